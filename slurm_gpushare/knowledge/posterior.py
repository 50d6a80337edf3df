"""What is known of particular jobs after observations among them.

Everything in the model of `interference.py` is Gaussian but for the product of sensitivity and pressure: it is
linearised at the current estimate, solved exactly, and both are repeated a few times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.interference import (
    PESSIMISM,
    Coefficients,
    Interference,
    Observed,
    Telemetry,
    expected,
    jobs_known,
)
from slurm_gpushare.knowledge.rates import RateTable

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

_STEPS = 6
_OUTLIER = 4.0


class Posterior:
    """The joint distribution of all log slow-downs among some jobs, given those that were observed."""

    def __init__(
        self, general: Interference, jobs: Telemetry, observed: Observed, families: Index | None = None
    ) -> None:
        """`families`: which jobs have a part of their own effects in common; none where not given."""
        self.general = general
        self.jobs = jobs
        self.observed = observed
        spread, prior = general.spread, general.coefficients
        design = general.design(jobs)
        n = len(jobs)
        self.loadings = np.zeros((2 * n, 5))  # of (log s, log h) on the coefficients
        self.loadings[:n, :3], self.loadings[n:, 3:] = design, design[:, 1:]
        self._mean = self.loadings @ prior.mean
        self._covariance = self.loadings @ prior.covariance @ self.loadings.T
        kin = np.eye(n) if families is None else kinship(families, spread.family)
        for part, own in ((slice(0, n), spread.sensitivity), (slice(n, 2 * n), spread.pressure)):
            sd = np.sqrt(general.own(jobs, own))
            self._covariance[part, part] += np.outer(sd, sd) * kin
        self.like = _likeness(jobs, spread.reach)
        self._n = n
        self._logs = self._mean.copy()
        self._solve()

    def rates(self, pessimism: float = PESSIMISM) -> RateTable:
        """The rates of every job beside every other, and beside its own kind."""
        return expected(*self.table(), pessimism)

    def table(self) -> tuple[Floats, Floats]:
        """Mean and variance of the log slow-down of every job beside every other, victims in rows."""
        victims, neighbours = (index.astype(np.intp) for index in np.divmod(np.arange(self._n**2), self._n))
        mean, variance = self.predict(victims, neighbours)
        return mean.reshape(self._n, self._n), variance.reshape(self._n, self._n)

    def predict(self, victims: Index, neighbours: Index) -> tuple[Floats, Floats]:
        """Mean and variance of the log slow-down of each pair."""
        product = self._product(victims, neighbours)
        moved = (self._logs - self._mean)[victims] + (self._logs - self._mean)[self._n + neighbours]
        cross = self._kernel(product, victims, neighbours)
        mean = product * (1.0 - moved) + cross @ self._weights
        own = np.diag(self._covariance)
        s, h = victims, self._n + neighbours
        relative = own[s] + own[h] + 2.0 * self._covariance[s, h] + self.general.pair_relative
        prior = product**2 * relative + self.general.absolute
        return mean, np.maximum(prior - np.einsum("ij,ji->i", cross, self._inverse @ cross.T), 1e-8)

    def coefficients(self) -> Coefficients:
        """The coefficients after the observations."""
        prior = self.general.coefficients
        gain = prior.covariance @ self.jacobian.T
        covariance = prior.covariance - gain @ self._inverse @ gain.T
        return Coefficients(prior.mean + gain @ self._weights, (covariance + covariance.T) / 2.0)

    @property
    def residual(self) -> Floats:
        """What the linearised model, at its prior mean, leaves of the observed log slow-downs."""
        moved = self._logs - self._mean
        seen = self.observed
        expectation = self.at_observed * (1.0 - moved[seen.victim] - moved[self._n + seen.neighbour])
        return np.asarray(seen.log_slowdown - expectation, dtype=np.float64)

    @property
    def jacobian(self) -> Floats:
        """Of the observed log slow-downs on the coefficients."""
        seen = self.observed
        return self.at_observed[:, None] * (self.loadings[seen.victim] + self.loadings[self._n + seen.neighbour])

    def _product(self, victims: Index, neighbours: Index) -> Floats:
        product: Floats = np.exp(np.clip(self._logs[victims] + self._logs[self._n + neighbours], -8.0, 1.2))
        return product

    def _kernel(self, product: Floats, victims: Index, neighbours: Index) -> Floats:
        """Covariance of the log slow-downs of these pairs with the observed ones."""
        spread, seen = self.general.spread, self.observed
        s, h, t, g = victims, self._n + neighbours, seen.victim, self._n + seen.neighbour
        effects = self._covariance[np.ix_(s, t)] + self._covariance[np.ix_(h, g)]
        effects += self._covariance[np.ix_(s, g)] + self._covariance[np.ix_(h, t)]
        same_victim = victims[:, None] == seen.victim
        same_neighbour = neighbours[:, None] == seen.neighbour
        same = same_victim & same_neighbour
        curves = same_victim * self.like[np.ix_(neighbours, seen.neighbour)]
        curves = curves + same_neighbour * self.like[np.ix_(victims, seen.victim)]
        relative = effects + spread.curve**2 * curves + spread.pair_relative**2 * same
        kernel = np.outer(product, self.at_observed) * relative
        return np.asarray(kernel + spread.offset**2 * same_victim + spread.pair**2 * same, dtype=np.float64)

    def _solve(self) -> None:
        seen = self.observed
        noise = seen.noise**2
        self.at_observed, self._weights = np.zeros(0), np.zeros(0)
        self._inverse: Floats = np.zeros((0, 0))
        if not len(seen.rate):
            return
        for step in range(_STEPS):
            self.at_observed = self._product(seen.victim, seen.neighbour)
            kernel = self._kernel(self.at_observed, seen.victim, seen.neighbour) + np.diag(noise + 1e-8)
            self._inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
            self._weights = self._inverse @ self.residual
            pull = self.at_observed * self._weights
            target = self._mean + self._covariance[:, seen.victim] @ pull
            target += self._covariance[:, self._n + seen.neighbour] @ pull
            if step + 1 < _STEPS:  # the last solution stays consistent with where it was linearised
                self._logs = self._logs + np.clip(target - self._logs, -1.0, 1.0)
                noise = self._doubted(seen.noise**2)

    def _doubted(self, noise: Floats) -> Floats:
        """More noise for observations that all the others contradict: one bad measurement must not poison a job."""
        precision: Floats = np.maximum(np.diag(self._inverse), 1e-12)
        surprise = np.abs(self._weights) / np.sqrt(precision)  # left-one-out residual over its standard deviation
        extra: Floats = np.where(surprise > _OUTLIER, ((surprise / _OUTLIER) ** 2 - 1.0) / precision, 0.0)
        return np.asarray(noise + extra, dtype=np.float64)


def kinship(families: Index, share: float) -> Floats:
    """Correlation of the jobs' own effects: 1 with itself, `share` within a family."""
    same = (families[:, None] == families[None, :]).astype(np.float64)
    correlation: Floats = share * same + (1.0 - share) * np.eye(len(families))
    return correlation


def _likeness(jobs: Telemetry, reach: float) -> Floats:
    known = jobs_known(jobs)
    busy, access = np.where(known, jobs.busy, 0.0), np.where(known, jobs.access, 0.0)
    points = np.column_stack([busy, access, np.sqrt(busy * access)]).astype(np.float64)
    distance = np.square(points[:, None, :] - points[None, :, :]).sum(axis=2)
    like = np.exp(-distance / (2.0 * reach**2)) * np.outer(known, known)
    np.fill_diagonal(like, 1.0)
    filled: Floats = like
    return filled
