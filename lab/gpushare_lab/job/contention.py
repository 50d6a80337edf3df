"""How much jobs on one emulated card slow each other when no measured table says so.

The logarithm of a job's slow-down is a product: how exposed the job is, times how hard its neighbour presses. On the
328 measured V100 pairs that form explains 94 % of the variance of log slow-down, and the jobs that press hardest are
the least exposed (correlation -0.64). So pressure grows steeply with GPU utilisation and memory access, and exposure
falls with utilisation and rises with the share of its GPU time that a job spends on memory.

The constants were fitted so that the ISD and PS of all pairs of the paper's 41 workloads that use the GPU at least 10 %
are spread as those of the V100 pairs; bench/bench_contention.py compares the two, docs/testbed.md shows the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpushare_lab.emulator.card import Demand

EXPOSURE, SHELTER, MEMORY_BOUND = 1.38, 1.31, 0.74
MAX_LOG_SLOWDOWN = math.log(5.8)  # the worst that was measured beside one neighbour: ISD 476 %


def pressure(neighbour: Demand) -> float:
    """How hard a job presses on whoever shares its card, 0 for one that leaves the GPU alone."""
    gpu, access = neighbour.gpu_util_pct / 100, neighbour.mem_access_pct / 100
    time_slicing = 0.155 * (1 - math.exp(-gpu / 0.10))  # any active neighbour costs that much
    weight = 0.80 * gpu + 0.285 * access
    return time_slicing + 1.15 * math.pow(weight, 3.2)


def exposure(victim: Demand) -> float:
    """How much of a neighbour's pressure a job feels; 1 is typical, 0 never touches the GPU."""
    gpu, access = victim.gpu_util_pct / 100, victim.mem_access_pct / 100
    if gpu <= 0:
        return 0.0
    memory_bound = min(1.0, access / gpu)
    return (1 - math.exp(-gpu / 0.02)) * max(0.1, EXPOSURE - SHELTER * gpu + MEMORY_BOUND * memory_bound)


def rate(victim: Demand, neighbours: Sequence[Demand]) -> float:
    """Speed of `victim` beside `neighbours` over its speed alone, in (0, 1]; several neighbours add up."""
    felt = exposure(victim)
    return math.exp(-sum(min(felt * pressure(neighbour), MAX_LOG_SLOWDOWN) for neighbour in neighbours))
