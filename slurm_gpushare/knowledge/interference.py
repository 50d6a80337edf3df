"""Sensitivity times pressure: how the telemetry of two jobs tells what they do to each other.

The log slow-down of job i beside job j is modelled as

    y_ij = s_i * h_j + g1 f_i + g2 f_j + c_i + e_j + p_ij
    log s_i = a0 + a1 log u_i + a2 log m_i + z_i      how sensitive job i is
    log h_j =      b1 log u_j + b2 log m_j + w_j      how hard job j presses

with u the share of time the GPU was busy, m the share it spent accessing memory and f the share of the card's memory
that the job fills, against the typical job's. z and w are what telemetry does not tell of a token, c an error in its
speed alone, e what it costs any neighbour alike, p what only this pair does. All have Gaussian priors. The constants
here are round and wide; `empirical.py` learns coefficients and spreads from measured pairs, `beliefs.py` what one
more observation says of the jobs at hand, `beliefs.py` what all of them say jointly. docs/knowledge.md has the
derivation and what it is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.rates import Floats, Index, RateTable

COEFFICIENTS = 7
Z, W, C, E = range(4)
"""Where a job's sensitivity, pressure, offset and burden stand in arrays of all four."""

FLOOR = 0.01
"""Added to a share before its logarithm: a job that NVML sees at 0 % still does something."""
MIN_RATE = 0.02
MAX_RATE = 1.1
"""A measured rate above 1 says that the speed alone was measured low; beyond this it says nothing more."""
LEAST_LOG, MOST_LOG = -8.0, 1.2
"""Bounds of log s + log h: no two jobs disturb each other less, or more, and no exponential overflows."""
PESSIMISM = 1.2816
"""Standard deviations from the mean to the pessimistic end: nine of ten true rates lie above it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Prior standard deviations of what is learned: where `empirical.py` starts from, and all there is without data.

    `offset`, `burden`, `pair_relative`, `pair` and `noise` are of the order that the V100 pairs alone show
    (docs/knowledge.md).
    """

    sensitivity: float = 0.3
    """Of z: two jobs of the same telemetry may well differ by a third."""
    pressure: float = 0.3
    family: float = 0.5
    """The share of the variance of z and w that jobs of one family have in common."""
    unknown: float = 0.7
    """Of z and w of a job without telemetry: twice as sensitive as the typical job, or half, is nothing unusual."""
    offset: float = 0.1
    """Of c, in log slow-down."""
    burden: float = 0.1
    """Of e, in log slow-down."""
    pair_relative: float = 0.1
    """Of p, as a share of the expected log slow-down."""
    pair: float = 0.05
    """Of p, in log slow-down, however little the two disturb each other."""
    noise: float = 0.01
    """Of one measured rate, relative, where the measurement does not say."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """(a0, a1, a2, b1, b2, g1, g2): their mean and covariance."""

    mean: Floats
    covariance: Floats

    @classmethod
    def prior(cls) -> Coefficients:
        """Before any data of a card: how busy the neighbour is counts most, which numbers count how much may differ.

        From an even start (0.5 each) pairs measured on an A100 led to 0.35 and 0.01 for sensitivity, 0.64 and 0.44 for
        pressure; another card may differ from that one as far, so this is a part of the way, +- 0.25. Two jobs that
        keep the card busy all the time, half of it accessing memory, halve each other: a0 is
        log(log(2) / 0.5 ** 0.9) = 0.25, +- 0.5. A full card may cost either job something, 0 +- 0.2.
        """
        sd = np.array([0.5, 0.25, 0.25, 0.25, 0.25, 0.2, 0.2])
        return cls(np.array([0.25, 0.4, 0.4, 0.6, 0.5, 0.0, 0.0]), np.diag(np.square(sd)))


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Shares, 0..1, of each job: of time GPU busy and accessing memory, of memory filled; NaN where not known."""

    busy: Floats
    access: Floats
    filled: Floats
    doubt: Floats | None = None
    """How many times as far off the prior may be, as for a job on one card; None: no further."""

    def __len__(self) -> int:
        return len(self.busy)

    def take(self, rows: NDArray[np.bool_] | Index) -> Telemetry:
        """Only these jobs."""
        doubt = None if self.doubt is None else self.doubt[rows]
        return Telemetry(self.busy[rows], self.access[rows], self.filled[rows], doubt)


@dataclass(frozen=True, slots=True)
class Observed:
    """Rates that were measured, by index of victim and neighbour."""

    victim: Index
    neighbour: Index
    rate: Floats
    noise: Floats
    """Standard deviation of each, relative."""

    def take(self, rows: Index) -> Observed:
        """Only these."""
        return Observed(self.victim[rows], self.neighbour[rows], self.rate[rows], self.noise[rows])

    @property
    def log_slowdown(self) -> Floats:
        return -np.log(np.clip(self.rate, MIN_RATE, MAX_RATE))


@dataclass(frozen=True)
class Interference:
    """What is known of a GPU model's jobs in general: coefficients and spreads."""

    coefficients: Coefficients = field(default_factory=Coefficients.prior)
    spread: Spread = field(default_factory=Spread)
    typical: tuple[float, float, float] = (-0.2, -0.9, 0.4)
    """Log u, log m and f that stand in where a job's own are not known. Of the V100 pairs' jobs nobody measured them;
    with these the heaviest third of them, which halve each other, are jobs that fill the card (docs/knowledge.md)."""

    def loads(self, jobs: Telemetry) -> Floats:
        """How (log s, log h, c, e) of each job follow the coefficients: one matrix of 4 by 7 a job."""
        loads = np.zeros((len(jobs), 4, COEFFICIENTS))
        design = self.design(jobs)
        loads[:, Z, :3], loads[:, W, 3:5] = design, design[:, 1:]
        loads[:, C, 5] = loads[:, E, 6] = np.where(np.isnan(jobs.filled), 0.0, jobs.filled - self.typical[2])
        return loads

    def starts(self, jobs: Telemetry) -> Floats:
        """Variances of (z, w, c, e) of each job before anything was observed."""
        spread, known = self.spread, jobs_known(jobs)
        own = [np.where(known, sd, spread.unknown) for sd in (spread.sensitivity, spread.pressure)]
        own += [np.full(len(jobs), sd) for sd in (spread.offset, spread.burden)]
        sd = np.column_stack(own) * (1.0 if jobs.doubt is None else jobs.doubt[:, None])
        return np.maximum(np.square(sd), 1e-12)  # we divide by it

    def pair_variance(self, product: Floats) -> Floats:
        """Variance of what only a pair does, where its sensitivity times pressure is `product`."""
        return np.asarray(self.spread.pair_relative**2 * product**2 + self.spread.pair**2, dtype=np.float64)

    def design(self, jobs: Telemetry) -> Floats:
        """(1, log u, log m) of each job."""
        busy = np.where(np.isnan(jobs.busy), self.typical[0], np.log(np.nan_to_num(jobs.busy) + FLOOR))
        access = np.where(np.isnan(jobs.access), self.typical[1], np.log(np.nan_to_num(jobs.access) + FLOOR))
        return np.column_stack([np.ones(len(jobs)), busy, access])


GANG_DOUBT = 1.5
"""Nobody has measured pairs of gangs: the prior is that of jobs on one card, and may be half as far off again."""


def blank_telemetry(count: int) -> Telemetry:
    """Jobs of which nothing was measured."""
    return Telemetry(*(np.full(count, np.nan) for _ in range(3)))


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
