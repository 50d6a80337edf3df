"""How much jobs on one emulated card slow each other when no measured table says so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_gpushare.testbed.emulator.card import Demand


def pressure(neighbour: Demand) -> float:
    """How hard a job presses on whoever shares its card, 0 for an idle one."""
    return 0.1 * neighbour.gpu_util_pct / 100 + 1.1 * (neighbour.gpu_util_pct / 100) ** 2


def exposure(victim: Demand) -> float:
    """How much of a neighbour's pressure a job feels."""
    return 0.4 + 0.6 * victim.gpu_util_pct / 100


def rate(victim: Demand, neighbours: Sequence[Demand]) -> float:
    """Speed of `victim` beside `neighbours` over its speed alone, in (0, 1]."""
    return math.exp(-exposure(victim) * sum(pressure(neighbour) for neighbour in neighbours))
