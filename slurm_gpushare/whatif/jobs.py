"""The jobs and the measured pairs of a simulation, read once and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.tables import read_pairs
from slurm_gpushare.protocol.errors import BadInput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


MECHANISMS = ("as-measured", "mps", "slices")
MECHANISM = "whether the pairs were measured under MPS is not known: with 'slices' they count as if they were"


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """How fast each profile runs beside each other one. NaN: the two cannot share."""

    profiles: tuple[str, ...]  # sorted
    rate: Floats  # row: the job, column: its neighbour

    def under(self, mechanism: str) -> MeasuredPairs:
        """The same pairs under the other of two mechanisms, of which nobody has measured them.

        ``mps``: these rates are of time slices, and are wanted under MPS; ``slices`` the other way round. Losses are
        scaled by what was measured of training beside inference on an A100: both speeds add up to 1.76 under MPS
        and to 1.42 in slices. No pair comes out slower than by turns, at half of its speed, unless it was.
        """
        if mechanism == "as-measured":
            return self
        factor = (2.0 - 1.42) / (2.0 - 1.76)
        scaled = 1.0 - (1.0 - self.rate) * (factor if mechanism == "slices" else 1.0 / factor)
        return MeasuredPairs(self.profiles, np.maximum(scaled, np.minimum(self.rate, 0.5)))

    def capped(self, isd_pct: float) -> MeasuredPairs:
        """The same without the pairs that slow either job by more than `isd_pct`."""
        floor = 1.0 / (1.0 + isd_pct / 100.0)
        with np.errstate(invalid="ignore"):
            keep = self.rate >= floor
        return MeasuredPairs(self.profiles, np.where(keep & keep.T, self.rate, np.nan))


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in submit order."""

    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints
    fraction: Floats | None = None
    """What each needs of its one card, where some ask for less than all of it."""
    group: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedJobs:
    """What one simulation runs: jobs with their profiles, on `gpus` equal cards."""

    gpus: int
    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints
    profile: Ints  # index into pairs.profiles
    pairs: MeasuredPairs
    seed: int
    gpus_per_node: int = 0
    """0: any GPUs will do for a job of several."""

    @property
    def jobs(self) -> int:
        return len(self.submit_s)


def read_rates(path: Path, profiles: Sequence[str] | None = None) -> MeasuredPairs:
    """Measured pairs as a table; `profiles` (default: all that occur in the file) are those that jobs may get."""
    rows = read_pairs(path, profiles)
    names = sorted(profiles or rows.names)
    at = {name: i for i, name in enumerate(names)}
    rate = np.full((len(names), len(names)), np.nan)
    for a, b, rate_a, rate_b in zip(rows.profile_a, rows.profile_b, rows.rate_a, rows.rate_b, strict=True):
        if a == b:
            rate[at[a], at[a]] = (rate_a + rate_b) / 2
        else:
            rate[at[a], at[b]], rate[at[b], at[a]] = rate_a, rate_b
    return MeasuredPairs(tuple(names), rate)


def make_workload(
    trace: Trace,
    pairs: MeasuredPairs,
    *,
    gpus: int,
    jobs: int | None,
    load: float,
    seed: int,
    multi_gpu: bool = False,
    gpus_per_node: int = 0,
) -> SimulatedJobs:
    """Pick the jobs, scale their arrivals to `load` (0: as in the trace) and deal them profiles."""
    if gpus_per_node and gpus % gpus_per_node:
        raise BadInput(f"--gpus {gpus}: no whole number of nodes of {gpus_per_node}")
    chosen = np.flatnonzero((trace.num_gpus <= gpus) if multi_gpu else (trace.num_gpus == 1))
    if len(chosen) == 0:
        raise BadInput("the trace has no job that fits", "Single-GPU jobs are needed, or --multi-gpu and enough GPUs.")
    if jobs is not None and jobs > len(chosen):
        raise BadInput(f"--jobs {jobs}: the trace has only {len(chosen)} jobs that fit")
    chosen = chosen[:jobs]
    submit_s = trace.submit_s[chosen] - trace.submit_s[chosen[0]]
    duration_s, num_gpus = trace.duration_s[chosen], trace.num_gpus[chosen]
    if load > 0:
        if submit_s[-1] <= 0:
            raise BadInput(f"--load {load:g}: impossible, all jobs are submitted at once", "Use --load 0.")
        submit_s = submit_s * (float(np.sum(duration_s * num_gpus)) / (gpus * float(submit_s[-1]) * load))
    profile = np.random.default_rng(seed).integers(len(pairs.profiles), size=len(chosen))
    work = SimulatedJobs(gpus, submit_s, duration_s, num_gpus, profile.astype(np.int64), pairs, seed, gpus_per_node)
    return work if trace.fraction is None else with_fractions(work, trace.fraction[chosen])


FRACTIONS = 4


def with_fractions(work: SimulatedJobs, fraction: Floats) -> SimulatedJobs:
    """The same jobs where two fit on a card only if what they ask for of it does.

    Fractions are rounded up to quarters of a card: each profile then has four kinds, which run alike.
    """
    size = np.clip(np.ceil(fraction * FRACTIONS - 1e-9), 1, FRACTIONS).astype(np.int64)
    names = tuple(f"{name}@{n}" for name in work.pairs.profiles for n in range(1, FRACTIONS + 1))
    sizes = np.tile(np.arange(1, FRACTIONS + 1), len(work.pairs.profiles))
    rate = np.repeat(np.repeat(work.pairs.rate, FRACTIONS, axis=0), FRACTIONS, axis=1)
    fits = sizes[:, None] + sizes <= FRACTIONS
    kinds = MeasuredPairs(names, np.where(fits, rate, np.nan))
    return replace(work, profile=work.profile * FRACTIONS + size - 1, pairs=kinds)
