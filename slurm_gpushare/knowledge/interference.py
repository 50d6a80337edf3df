"""Sensitivity times pressure: how the telemetry of two jobs tells what they do to each other.

The log slow-down of job i beside job j is modelled as

    y_ij = s_i * h_j + c_i + p_ij
    log s_i = a0 + a1 log u_i + a2 log m_i + z_i      how sensitive job i is
    log h_j =      b1 log u_j + b2 log m_j + w_j      how hard job j presses

with u the share of time the GPU was busy and m the share it spent accessing memory. z and w are what telemetry does not
tell of a token, c an error in its speed alone, p what only this pair does. All have Gaussian priors, so that one solver
serves everything: on measured pairs it learns the coefficients (`fit`), on observations of new tokens z, w, c and p too
(`Posterior`). The product makes it non-linear: it is linearised at the current estimate and solved again a few times.
docs/knowledge.md has the derivation and what it is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.rates import RateTable

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

FLOOR = 0.01
"""Added to a share before its logarithm: a job that NVML sees at 0 % still does something."""
MIN_RATE = 0.02
MAX_RATE = 1.1
"""A measured rate above 1 says that the speed alone was measured low; beyond this it says nothing more."""
PESSIMISM = 1.2816
"""Standard deviations from the mean to the pessimistic end: nine of ten true rates lie above it."""
_STEPS = 6
_OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Prior standard deviations of what is learned."""

    sensitivity: float = 0.25
    """Of z: about a quarter of a token's sensitivity is not in its telemetry."""
    pressure: float = 0.25
    offset: float = 0.05
    """Of c, in log slow-down."""
    pair_relative: float = 0.12
    """Of p, as a share of the expected log slow-down."""
    pair: float = 0.03
    """Of p, in log slow-down, however little the two disturb each other."""
    curve: float = 0.1
    """Of the part of p that neighbours with like telemetry share."""
    reach: float = 0.35
    """How unlike (in u and m) telemetry may be to count as like."""
    noise: float = 0.012
    """Of one measured rate, relative, where the measurement does not say."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """(a0, a1, a2, b1, b2): their mean and covariance."""

    mean: Floats
    covariance: Floats

    @classmethod
    def prior(cls) -> Coefficients:
        """Before any data: sensitive is who is busy and bound by memory, and pressure grows faster than busy time."""
        return cls(np.array([0.0, 0.3, 0.3, 1.5, 0.2]), np.diag(np.square([0.5, 0.05, 0.05, 0.05, 0.05])))


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Shares of time, 0..1, of each job: GPU busy and accessing memory; NaN where not known."""

    busy: Floats
    access: Floats

    def __len__(self) -> int:
        return len(self.busy)

    def then(self, other: Telemetry) -> Telemetry:
        """These jobs followed by `other`."""
        return Telemetry(np.concatenate([self.busy, other.busy]), np.concatenate([self.access, other.access]))


@dataclass(frozen=True, slots=True)
class Observed:
    """Rates that were measured, by index of victim and neighbour."""

    victim: Index
    neighbour: Index
    rate: Floats
    noise: Floats
    """Standard deviation of each, relative."""

    @property
    def log_slowdown(self) -> Floats:
        return -np.log(np.clip(self.rate, MIN_RATE, MAX_RATE))


@dataclass(frozen=True)
class Interference:
    """What is known of a GPU model's jobs in general: coefficients and spreads."""

    coefficients: Coefficients = field(default_factory=Coefficients.prior)
    spread: Spread = field(default_factory=Spread)
    typical: tuple[float, float] = (-0.7, -1.4)
    """Log u and log m that stand in where a job's own are not known."""
    unknown: float = 0.7
    """Spread of sensitivity and of pressure of a job without telemetry."""

    def rates(self, victims: Telemetry, neighbours: Telemetry, pessimism: float = PESSIMISM) -> RateTable:
        """Rates of jobs that were never observed, every victim beside every neighbour."""
        s, s_variance = self._logs(self._design(victims), victims, self.spread.sensitivity, slice(0, 3))
        h, h_variance = self._logs(self._design(neighbours)[:, 1:], neighbours, self.spread.pressure, slice(3, 5))
        cross = self._design(victims) @ self.coefficients.covariance[:3, 3:] @ self._design(neighbours)[:, 1:].T
        product = np.exp(s)[:, None] * np.exp(h)[None, :]
        relative = s_variance[:, None] + h_variance[None, :] + 2.0 * cross + self._pair_relative
        return expected(product, product**2 * relative + self._absolute, pessimism)

    def log_effects(self, jobs: Telemetry) -> tuple[Floats, Floats, Floats, Floats]:
        """Log sensitivity and log pressure of each job, and the standard deviation of each."""
        s, s_variance = self._logs(self._design(jobs), jobs, self.spread.sensitivity, slice(0, 3))
        h, h_variance = self._logs(self._design(jobs)[:, 1:], jobs, self.spread.pressure, slice(3, 5))
        return s, np.sqrt(s_variance), h, np.sqrt(h_variance)

    def fit(self, jobs: Telemetry, observed: Observed) -> Interference:
        """The coefficients after these measurements; the jobs' own effects are integrated out."""
        posterior = Posterior(self, jobs, observed)
        known = jobs_known(jobs)
        typical = self.typical
        if known.any():
            logs = self._design(Telemetry(jobs.busy[known], jobs.access[known]))[:, 1:].mean(axis=0)
            typical = (float(logs[0]), float(logs[1]))
        return replace(self, coefficients=posterior.coefficients(), typical=typical)

    @property
    def _pair_relative(self) -> float:
        return self.spread.pair_relative**2 + 2.0 * self.spread.curve**2

    @property
    def _absolute(self) -> float:
        return self.spread.pair**2 + self.spread.offset**2

    def _design(self, jobs: Telemetry) -> Floats:
        busy = np.where(np.isnan(jobs.busy), self.typical[0], np.log(np.nan_to_num(jobs.busy) + FLOOR))
        access = np.where(np.isnan(jobs.access), self.typical[1], np.log(np.nan_to_num(jobs.access) + FLOOR))
        return np.column_stack([np.ones(len(jobs)), busy, access])

    def _own(self, jobs: Telemetry, spread: float) -> Floats:
        return np.where(jobs_known(jobs), spread, self.unknown) ** 2

    def _logs(self, design: Floats, jobs: Telemetry, spread: float, part: slice) -> tuple[Floats, Floats]:
        covariance = self.coefficients.covariance[part, part]
        variance = np.einsum("ij,jk,ik->i", design, covariance, design) + self._own(jobs, spread)
        return design @ self.coefficients.mean[part], variance


class Posterior:
    """What is known of particular jobs after observations among them."""

    def __init__(self, general: Interference, jobs: Telemetry, observed: Observed) -> None:
        self.general = general
        self.observed = observed
        spread, prior = general.spread, general.coefficients
        design = general._design(jobs)
        n = len(jobs)
        self._loadings = np.zeros((2 * n, 5))  # of (log s, log h) on the coefficients
        self._loadings[:n, :3], self._loadings[n:, 3:] = design, design[:, 1:]
        own = np.concatenate([general._own(jobs, spread.sensitivity), general._own(jobs, spread.pressure)])
        self._mean = self._loadings @ prior.mean
        self._covariance = self._loadings @ prior.covariance @ self._loadings.T + np.diag(own)
        self._like = _likeness(jobs, spread.reach)
        self._n = n
        self._logs = self._mean.copy()
        self._solve()

    def rates(self, pessimism: float = PESSIMISM) -> RateTable:
        """The rates of every job beside every other, and beside its own kind."""
        victims, neighbours = (index.astype(np.intp) for index in np.divmod(np.arange(self._n**2), self._n))
        mean, variance = self.predict(victims, neighbours)
        shape = (self._n, self._n)
        return expected(mean.reshape(shape), variance.reshape(shape), pessimism)

    def predict(self, victims: Index, neighbours: Index) -> tuple[Floats, Floats]:
        """Mean and variance of the log slow-down of each pair."""
        product = self._product(victims, neighbours)
        moved = (self._logs - self._mean)[victims] + (self._logs - self._mean)[self._n + neighbours]
        cross = self._kernel(product, victims, neighbours)
        mean = product * (1.0 - moved) + cross @ self._weights
        own = np.diag(self._covariance)
        s, h = victims, self._n + neighbours
        relative = own[s] + own[h] + 2.0 * self._covariance[s, h] + self.general._pair_relative
        prior = product**2 * relative + self.general._absolute
        return mean, np.maximum(prior - np.einsum("ij,ji->i", cross, self._inverse @ cross.T), 1e-8)

    def coefficients(self) -> Coefficients:
        """The coefficients after the observations."""
        prior = self.general.coefficients
        jacobian = self._at_observed[:, None] * (
            self._loadings[self.observed.victim] + self._loadings[self._n + self.observed.neighbour]
        )
        gain = prior.covariance @ jacobian.T
        covariance = prior.covariance - gain @ self._inverse @ gain.T
        return Coefficients(prior.mean + gain @ self._weights, (covariance + covariance.T) / 2.0)

    @property
    def evidence(self) -> float:
        """Log density of the observations under the linearised model: what spreads are compared by."""
        return self._evidence

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
        curves = same_victim * self._like[np.ix_(neighbours, seen.neighbour)]
        curves = curves + same_neighbour * self._like[np.ix_(victims, seen.victim)]
        relative = effects + spread.curve**2 * curves + spread.pair_relative**2 * same
        kernel = np.outer(product, self._at_observed) * relative
        return np.asarray(kernel + spread.offset**2 * same_victim + spread.pair**2 * same, dtype=np.float64)

    def _solve(self) -> None:
        seen, y = self.observed, self.observed.log_slowdown
        noise = seen.noise**2
        self._evidence = 0.0
        self._at_observed, self._weights = np.zeros(0), np.zeros(0)
        self._inverse: Floats = np.zeros((0, 0))
        if not len(y):
            return
        for step in range(_STEPS):
            self._at_observed = self._product(seen.victim, seen.neighbour)
            kernel = self._kernel(self._at_observed, seen.victim, seen.neighbour) + np.diag(noise + 1e-8)
            moved = self._logs - self._mean
            residual = y - self._at_observed * (1.0 - moved[seen.victim] - moved[self._n + seen.neighbour])
            self._inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
            self._weights = self._inverse @ residual
            pull = self._at_observed * self._weights
            target = self._mean + self._covariance[:, seen.victim] @ pull
            target += self._covariance[:, self._n + seen.neighbour] @ pull
            if step + 1 < _STEPS:  # the last solution stays consistent with where it was linearised
                self._logs = self._logs + np.clip(target - self._logs, -1.0, 1.0)
                noise = self._doubted(seen.noise**2)
        _, log_determinant = np.linalg.slogdet(kernel)
        self._evidence = float(-0.5 * residual @ self._weights - 0.5 * log_determinant - len(y) * 0.9189385332)

    def _doubted(self, noise: Floats) -> Floats:
        """More noise for observations that all the others contradict: one bad measurement must not poison a job."""
        precision: Floats = np.maximum(np.diag(self._inverse), 1e-12)
        surprise = np.abs(self._weights) / np.sqrt(precision)  # left-one-out residual over its standard deviation
        extra: Floats = np.where(surprise > _OUTLIER, ((surprise / _OUTLIER) ** 2 - 1.0) / precision, 0.0)
        return np.asarray(noise + extra, dtype=np.float64)


def jobs_known(jobs: Telemetry) -> NDArray[np.bool_]:
    """Which jobs have all the telemetry that the model uses."""
    return ~(np.isnan(jobs.busy) | np.isnan(jobs.access))


def expected(mean: Floats, variance: Floats, pessimism: float) -> RateTable:
    """Expected rates, and their pessimistic ends, where the log slow-down is Gaussian but a rate is never above 1."""
    from scipy.special import ndtr  # here, so that reading a knowledge base does not pay for scipy

    sd = np.sqrt(variance)
    rate = ndtr(-mean / sd) + np.exp(np.minimum(variance / 2.0 - mean, 0.0)) * ndtr(mean / sd - sd)
    low = np.exp(-np.maximum(mean + pessimism * sd, 0.0))
    return RateTable(np.clip(rate, MIN_RATE, 1.0), np.clip(low, MIN_RATE, 1.0))


def _likeness(jobs: Telemetry, reach: float) -> Floats:
    known = jobs_known(jobs)
    busy, access = np.where(known, jobs.busy, 0.0), np.where(known, jobs.access, 0.0)
    points = np.column_stack([busy, access, np.sqrt(busy * access)]).astype(np.float64)
    distance = np.square(points[:, None, :] - points[None, :, :]).sum(axis=2)
    like = np.exp(-distance / (2.0 * reach**2)) * np.outer(known, known)
    np.fill_diagonal(like, 1.0)
    filled: Floats = like
    return filled
