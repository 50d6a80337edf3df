"""One run in a few numbers, for its owner: what ``gpushare job`` shows of a record."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_gpushare.protocol.record import Period, Record

NEARLY_WHOLE_PCT = 72.0
"""JAX takes three quarters of a card in advance, TensorFlow nearly all of it."""
STEADY = 0.9


def looks_preallocated(peak_pct: float | None, mean_pct: float | None) -> bool:
    """Whether a job held nearly the whole card's memory nearly all the time: a framework that takes it in advance."""
    if peak_pct is None or mean_pct is None:
        return False
    return peak_pct >= NEARLY_WHOLE_PCT and mean_pct >= STEADY * peak_pct


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What was measured of a job; None where it was not. Means are over the time that was measured."""

    gpu_model: str | None = None
    measured_s: float = 0.0
    profile_s: float = 0.0
    """The part of it that the profile covers: the first epoch, if the job told its end."""
    closed: str = ""
    """Why the profile ended: epoch, limit, end; open while it lasts."""
    gpu_busy_pct: float | None = None
    gpu_mem_peak_mib: float | None = None
    gpu_mem_total_mib: float | None = None
    preallocated: bool = False
    """Whether it looks as if its framework took the card's memory in advance, whatever it needs."""
    mem_access_pct: float | None = None
    cpu_cores: float | None = None
    """Cores that its processes kept busy, over the profile."""
    host_mem_peak_mib: float | None = None
    power_w: float | None = None
    """Of the card, over the profile."""
    mgup: float | None = None
    mgmap: float | None = None
    mgtsamp: float | None = None
    alone_s: float = 0.0
    shared_s: float = 0.0
    end_s: float | None = None
    """When it was measured last; None of earlier releases' files."""
    blind: bool = False
    """Its card told nothing of single jobs (`Record.blind`)."""


def _mean(periods: Iterable[Period], name: str) -> float | None:
    stats = [period.stats[name] for period in periods if name in period.stats]
    samples = sum(stat.n for stat in stats)
    return sum(stat.n * stat.mean for stat in stats) / samples if samples else None


def run_figures(record: Record) -> RunFigures:
    """The figures of one record, interim or final."""
    profile, features, whole = record.profile.stats, record.features, (record.alone, record.shared)
    cpu, rss, power = profile.get("job_cpu_pct"), profile.get("job_rss_mib"), profile.get("power_w")
    peaks = [period.stats["gpu_mem_mib"].max for period in whole if "gpu_mem_mib" in period.stats]
    memory = profile.get("gpu_mem_pct")
    return RunFigures(
        gpu_model=record.gpu_model,
        measured_s=record.end_s - record.start_s,
        profile_s=record.profile.seconds,
        closed=record.closed.value,
        gpu_busy_pct=_mean(whole, "gpu_util_pct"),
        gpu_mem_peak_mib=max([*peaks, features.mem_used_mib or 0.0]) or None,
        gpu_mem_total_mib=features.mem_total_mib,
        preallocated=memory is not None and looks_preallocated(memory.max, memory.mean),
        mem_access_pct=_mean(whole, "mem_access_pct"),
        cpu_cores=cpu.mean / 100.0 if cpu else None,
        host_mem_peak_mib=rss.max if rss else None,
        power_w=power.mean if power else None,
        mgup=features.mgup,
        mgmap=features.mgmap,
        mgtsamp=features.mgtsamp,
        alone_s=record.alone_s,
        shared_s=record.shared_s,
        end_s=record.end_s,
        blind=record.blind,
    )


# Whether a job has the CPUs that suit it: too few keep its GPU waiting, too many keep other jobs waiting. After
# Synergy (OSDI 2022), which found that a GPU's fair share of CPUs is too little for some training jobs and far too
# much for others. What a job used is in its record; how fast it would be with others can only be tried.


ALL_BUSY = 0.9
"""From this part of its CPUs on, a job keeps all of them busy."""
GPU_WAITS_PCT = 60.0
"""A GPU that is less busy than this, beside CPUs that are all busy, waits for them."""
GPU_FULL_PCT = 90.0
MOST_FACTOR = 4
"""More CPUs than so many times those that it had are not advised from one run: something else will be short first."""
SPARE = 0.5
"""Of the CPUs, the part that a job uses at most if some are spare."""
HEADROOM = 1.5
"""CPUs advised over those that were busy on average: loaders work in bursts."""
LEAST_MEASURED_S = 60.0


@dataclass(frozen=True, slots=True)
class CpuAdvice:
    """Ask for `cpus` instead."""

    cpus: int
    used: float
    """Cores that were busy on average."""
    gpu_waits: bool
    """The GPU waits for the CPUs; else some CPUs have nothing to do."""


def cpu_advice(cpus: int, run: RunFigures | None) -> CpuAdvice | None:
    """Advice for a job that had `cpus`, or None where there is none or too little is known.

    Time shared says nothing of what the GPU waits for, since a neighbour makes it less busy too.
    """
    if run is None or run.cpu_cores is None or run.gpu_busy_pct is None or cpus < 1:
        return None
    if run.measured_s < LEAST_MEASURED_S:
        return None
    used, busy_pct = run.cpu_cores, run.gpu_busy_pct
    if used >= ALL_BUSY * cpus and busy_pct < GPU_WAITS_PCT and run.shared_s <= 0.1 * run.measured_s:
        # A step takes as long as its CPU work: with more of them the GPU is busier in proportion, until it is full.
        enough = math.ceil(cpus * GPU_FULL_PCT / max(busy_pct, 1.0))
        return CpuAdvice(min(enough, MOST_FACTOR * cpus), used, True)
    fewer = max(1, math.ceil(HEADROOM * used))
    if used <= SPARE * cpus and fewer < cpus:
        return CpuAdvice(fewer, used, False)
    return None
