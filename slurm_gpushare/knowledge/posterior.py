"""All observations at once: what they say jointly of the coefficients, the tokens and the pairs.

Everything in the model of `interference.py` is Gaussian but for the product of sensitivity and pressure: it is
linearised at the current estimate, solved exactly, and both are repeated a few times. The time grows with the cube of
the number of observations; `beliefs.py` takes in one more at a time.
"""

from __future__ import annotations

import numpy as np

from slurm_gpushare.knowledge.beliefs import Beliefs
from slurm_gpushare.knowledge.interference import (
    LEAST_LOG,
    MOST_LOG,
    C,
    Coefficients,
    E,
    Interference,
    Observed,
    Telemetry,
    W,
    Z,
)
from slurm_gpushare.knowledge.rates import Floats, Index

_STEPS = 6
_OUTLIER = 4.0


class Posterior:
    """The joint solution for some jobs and what was observed among them, linearised where it lies."""

    def __init__(
        self, general: Interference, jobs: Telemetry, observed: Observed, families: Index | None = None
    ) -> None:
        """`families`: which jobs have a part of their own effects in common; none where not given."""
        self.general = general
        self.jobs = jobs
        self.observed = observed
        self._load, self._start = general.loads(jobs), general.starts(jobs)
        kin = np.eye(len(jobs)) if families is None else kinship(families, general.spread.family)
        deviation = np.sqrt(self._start)
        self._own = [np.outer(deviation[:, own], deviation[:, own]) * kin for own in (Z, W)]
        self._by_victim, self._by_neighbour = self._load[observed.victim], self._load[observed.neighbour]
        self._at_prior = self._by_victim @ general.coefficients.mean, self._by_neighbour @ general.coefficients.mean
        self._logs = self._at_prior[0][:, Z] + self._at_prior[1][:, W]  # log s + log h of each observation
        self.coefficients = general.coefficients  # after the observations, with everything else integrated out
        self._inverse: Floats = np.zeros((0, 0))
        if len(observed.rate):
            self._solve()

    @property
    def product(self) -> Floats:
        """Sensitivity times pressure of each observation, at the solution."""
        return np.asarray(np.exp(np.clip(self._logs, LEAST_LOG, MOST_LOG)), dtype=np.float64)

    @property
    def residual(self) -> Floats:
        """What the linearised model, at its prior mean, leaves of the observed log slow-downs."""
        victim, neighbour = self._at_prior
        moved = victim[:, Z] + neighbour[:, W] - self._logs
        flat = victim[:, C] + neighbour[:, E]
        return np.asarray(self.observed.log_slowdown - self.product * (1.0 + moved) - flat, dtype=np.float64)

    @property
    def jacobian(self) -> Floats:
        """Of the observed log slow-downs on the coefficients."""
        by_logs = self._by_victim[:, Z] + self._by_neighbour[:, W]
        flat = self._by_victim[:, C] + self._by_neighbour[:, E]
        return np.asarray(self.product[:, None] * by_logs + flat, dtype=np.float64)

    def beliefs(self) -> Beliefs:
        """What is believed of each job and of each pair that was observed (each at most once) afterwards."""
        found, seen, start = Beliefs(self.general, self.jobs), self.observed, self._start
        if not len(seen.rate):
            return found
        found.mean, found.covariance = self.coefficients.mean.copy(), self.coefficients.covariance.copy()
        by_residual, by_jacobian = self._inverse @ self.residual, self._inverse @ self.jacobian
        for job in np.unique(np.concatenate([seen.victim, seen.neighbour])).tolist():
            mine = np.flatnonzero((seen.victim == job) | (seen.neighbour == job))
            victim, neighbour = seen.victim[mine] == job, seen.neighbour[mine] == job
            slopes = np.array([victim * self.product[mine], neighbour * self.product[mine], victim, neighbour])
            towards = start[job][:, None] * slopes  # covariance of (z, w, c, e) with each observation
            found.own[job] = towards @ by_residual[mine]
            found.follow[job] = -towards @ by_jacobian[mine]
            found.variance[job] -= towards @ self._inverse[np.ix_(mine, mine)] @ towards.T
        start_p = self.general.pair_variance(self.product)
        own, follow = start_p * by_residual, -start_p[:, None] * by_jacobian
        variance = start_p - start_p**2 * np.diag(self._inverse)
        for row, (i, j) in enumerate(zip(seen.victim.tolist(), seen.neighbour.tolist(), strict=True)):
            pair = found.pair(i, j)
            found.pair_own[pair], found.pair_follow[pair] = own[row], follow[row]
            found.pair_variance[pair] = variance[row]
        return found

    def _solve(self) -> None:
        seen, prior = self.observed, self.general.coefficients
        precision = np.linalg.inv(prior.covariance)
        noise = seen.noise**2
        for step in range(_STEPS):
            kernel = self._kernel() + np.diag(noise + 1e-8)
            self._inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
            residual, jacobian = self.residual, self.jacobian
            pulled = self._inverse @ jacobian
            covariance = np.linalg.inv(precision + jacobian.T @ pulled)
            covariance = (covariance + covariance.T) / 2.0
            moved = covariance @ (pulled.T @ residual)
            self.coefficients = Coefficients(prior.mean + moved, covariance)
            if step + 1 < _STEPS:  # the last solution stays consistent with where it was linearised
                weights = self._inverse @ (residual - jacobian @ moved)
                left = np.diag(self._inverse) - np.einsum("ij,jk,ik->i", pulled, covariance, pulled)
                self._logs = self._logs + np.clip(self._solution(weights, moved) - self._logs, -1.0, 1.0)
                noise = _doubted(seen.noise**2, weights, left)

    def _kernel(self) -> Floats:
        """Covariance of the observed log slow-downs, given the coefficients."""
        seen, spread, product = self.observed, self.general.spread, self.product
        same_victim = seen.victim[:, None] == seen.victim
        same_neighbour = seen.neighbour[:, None] == seen.neighbour
        same = same_victim & same_neighbour
        own = self._own[0][np.ix_(seen.victim, seen.victim)] + self._own[1][np.ix_(seen.neighbour, seen.neighbour)]
        kernel = np.outer(product, product) * (own + spread.pair_relative**2 * same)
        alike = spread.offset**2 * same_victim + spread.burden**2 * same_neighbour + spread.pair**2 * same
        return np.asarray(kernel + alike, dtype=np.float64)

    def _solution(self, weights: Floats, moved: Floats) -> Floats:
        """Log s + log h of each observation in the linearised model."""
        seen, pull, count = self.observed, self.product * weights, len(self.jobs)
        z = self._own[0] @ np.bincount(seen.victim, pull, count)
        w = self._own[1] @ np.bincount(seen.neighbour, pull, count)
        own = z[seen.victim] + w[seen.neighbour]
        shared = (self._by_victim[:, Z] + self._by_neighbour[:, W]) @ moved
        return np.asarray(self._at_prior[0][:, Z] + self._at_prior[1][:, W] + own + shared, dtype=np.float64)


def _doubted(noise: Floats, weights: Floats, left: Floats) -> Floats:
    """More noise for observations that all the others contradict: one bad measurement must not poison a job."""
    precision: Floats = np.maximum(left, 1e-12)
    surprise = np.abs(weights) / np.sqrt(precision)  # left-one-out residual over its standard deviation
    extra: Floats = np.where(surprise > _OUTLIER, ((surprise / _OUTLIER) ** 2 - 1.0) / precision, 0.0)
    return np.asarray(noise + extra, dtype=np.float64)


def kinship(families: Index, share: float) -> Floats:
    """Correlation of the jobs' own effects: 1 with itself, `share` within a family."""
    same = (families[:, None] == families[None, :]).astype(np.float64)
    correlation: Floats = share * same + (1.0 - share) * np.eye(len(families))
    return correlation
