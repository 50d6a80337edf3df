"""The jobs of a simulation: those of a published trace, each with one of the profiles whose pairs were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.knowledge.tables import read_pairs
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs, read_jobs, with_fractions


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in submit order."""

    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints
    fraction: Floats | None = None
    """What each needs of its one card, where some ask for less than all of it."""
    group: tuple[str, ...] = ()


def read_any_trace(path: Path) -> Trace:
    """A trace of any known kind, as the simulator reads it."""
    columns = zip(*((j.submit_s, j.duration_s, j.gpus, j.fraction, j.group) for j in read_jobs(path)), strict=True)
    submit, duration, gpus, fraction, group = columns
    some = any(value < 1.0 for value in fraction)
    return Trace(
        np.array(submit, float),
        np.array(duration, float),
        np.array(gpus, np.int64),
        np.array(fraction, float) if some else None,
        tuple(group),
    )


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
