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
        n = self._n = len(jobs)
        self._loadings = np.zeros((2 * n, 7))  # of (log s, log h) on the coefficients
        self._loadings[:n, :3], self._loadings[n:, 3:5] = design, design[:, 1:]
        self._fullness = general.fullness(jobs)
        self._mean = self._loadings @ prior.mean
        kin = np.eye(n) if families is None else kinship(families, spread.family)
        own_s, own_h = (np.sqrt(general.own(jobs, own)) for own in (spread.sensitivity, spread.pressure))
        self._own_s, self._own_h = np.outer(own_s, own_s) * kin, np.outer(own_h, own_h) * kin
        self.like = _likeness(jobs, spread.reach)
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
        by_coefficient = self._jacobian(product, victims, neighbours)
        cross = self._kernel(product, victims, neighbours)
        mean = self._at_prior(product, victims, neighbours) + cross @ self._weights
        own = np.diag(self._own_s)[victims] + np.diag(self._own_h)[neighbours] + self.general.pair_relative
        prior = product**2 * own + self.general.absolute
        prior += np.einsum("ij,jk,ik->i", by_coefficient, self.general.coefficients.covariance, by_coefficient)
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
        seen = self.observed
        return seen.log_slowdown - self._at_prior(self.at_observed, seen.victim, seen.neighbour)

    @property
    def jacobian(self) -> Floats:
        """Of the observed log slow-downs on the coefficients."""
        return self._jacobian(self.at_observed, self.observed.victim, self.observed.neighbour)

    def _jacobian(self, product: Floats, victims: Index, neighbours: Index) -> Floats:
        jacobian: Floats = product[:, None] * (self._loadings[victims] + self._loadings[self._n + neighbours])
        jacobian[:, 5], jacobian[:, 6] = self._fullness[victims], self._fullness[neighbours]
        return jacobian

    def _at_prior(self, product: Floats, victims: Index, neighbours: Index) -> Floats:
        """The linearised log slow-down of each pair at the prior mean of everything."""
        moved = (self._logs - self._mean)[victims] + (self._logs - self._mean)[self._n + neighbours]
        filled = self._fullness[victims], self._fullness[neighbours]
        g = self.general.coefficients.mean[5:]
        return np.asarray(product * (1.0 - moved) + g[0] * filled[0] + g[1] * filled[1], dtype=np.float64)

    def _product(self, victims: Index, neighbours: Index) -> Floats:
        product: Floats = np.exp(np.clip(self._logs[victims] + self._logs[self._n + neighbours], -8.0, 1.2))
        return product

    def _kernel(self, product: Floats, victims: Index, neighbours: Index) -> Floats:
        """Covariance of the log slow-downs of these pairs with the observed ones."""
        spread, seen = self.general.spread, self.observed
        effects = self._own_s[np.ix_(victims, seen.victim)] + self._own_h[np.ix_(neighbours, seen.neighbour)]
        same_victim = victims[:, None] == seen.victim
        same_neighbour = neighbours[:, None] == seen.neighbour
        same = same_victim & same_neighbour
        curves = same_victim * self.like[np.ix_(neighbours, seen.neighbour)]
        curves = curves + same_neighbour * self.like[np.ix_(victims, seen.victim)]
        relative = effects + spread.curve**2 * curves + spread.pair_relative**2 * same
        kernel = np.outer(product, self.at_observed) * relative
        kernel += self._jacobian(product, victims, neighbours) @ self.general.coefficients.covariance @ self.jacobian.T
        alone = spread.offset**2 * same_victim + spread.burden**2 * same_neighbour
        return np.asarray(kernel + alone + spread.pair**2 * same, dtype=np.float64)

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
            own = np.concatenate([self._own_s[:, seen.victim] @ pull, self._own_h[:, seen.neighbour] @ pull])
            shared = self.general.coefficients.covariance @ (self.jacobian.T @ self._weights)
            target = self._mean + self._loadings @ shared + own
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
