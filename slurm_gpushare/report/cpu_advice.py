"""Whether a job has the CPUs that suit it: too few keep its GPU waiting, too many keep other jobs waiting.

After Synergy (OSDI 2022), which found that a GPU's fair share of CPUs is too little for some training jobs and far too
much for others. What a job used is in its record; how fast it would be with others can only be tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_gpushare.node.figures import RunFigures

if TYPE_CHECKING:
    from slurm_gpushare.report.job_view import JobView

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


@dataclass(frozen=True, slots=True)
class CpuSummary:
    """The same over the jobs of a period."""

    judged: int
    """Jobs whose CPU use was measured."""
    short: int
    """Jobs whose GPU waited for CPUs."""
    spare: int
    """Jobs that had CPUs to spare."""
    spare_cpu_h: float
    """CPU hours that these had and would not have needed."""


def summarise_cpus(jobs: Iterable[JobView]) -> CpuSummary:
    """What the CPUs of these jobs were good for."""
    judged = [job for job in jobs if job.run is not None and job.run.cpu_cores is not None]
    advice = [(job, found) for job in judged if (found := job.cpu_advice) is not None]
    spare = [(job, found) for job, found in advice if not found.gpu_waits]
    unused_h = sum((job.cpus - found.cpus) * (job.elapsed_s or 0.0) for job, found in spare) / 3600
    return CpuSummary(len(judged), len(advice) - len(spare), len(spare), unused_h)
