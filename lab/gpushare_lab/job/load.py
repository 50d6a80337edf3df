"""What an emulated job's load looks like over an epoch: loading, training, validation, and noise."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gpushare_lab.emulator.card import Demand, Sample


@dataclass(frozen=True)
class Phase:
    """A part of an epoch, with its load as a share of the job's stated demand."""

    until: float  # fraction of the epoch's work at which it ends
    gpu: float
    memory: float
    pcie: float


# The training part is what the stated demand describes; the peaks that a profile records are its level.
PHASES = (Phase(0.04, 0.35, 0.30, 1.00), Phase(0.90, 1.00, 1.00, 0.60), Phase(1.00, 0.72, 0.65, 0.80))
NOISE = 0.015  # of the level, at most, either way


def mean_phase(begin: float, end: float) -> Phase:
    """Mean load over a stretch of work, in epochs (2.25 is a quarter into the third); at a point if they are equal."""
    if end - begin < 1e-9:
        at = begin % 1.0
        return next(phase for phase in PHASES if at < phase.until)
    shares = []
    for phase, since in zip(PHASES, (0.0, *(phase.until for phase in PHASES)), strict=False):
        length = phase.until - since

        def spent(at: float, since: float = since, length: float = length) -> float:
            """Work done in this phase from the first epoch's start to `at`."""
            return at // 1.0 * length + min(max(at % 1.0 - since, 0.0), length)

        shares.append((phase, (spent(end) - spent(begin)) / (end - begin)))
    return Phase(
        1.0,
        sum(phase.gpu * share for phase, share in shares),
        sum(phase.memory * share for phase, share in shares),
        sum(phase.pcie * share for phase, share in shares),
    )


def sample(demand: Demand, begin: float, end: float, rate: float, at_us: int, noise: random.Random) -> Sample:
    """The job's own load over a stretch of its work: a slowed job keeps the GPU busy less, in proportion."""
    phase = mean_phase(begin, end)

    def level(share: float, full: float, cap: float) -> float:
        return min(cap, full * share * rate * (1 + noise.uniform(-NOISE, NOISE)))

    rx_kb_s = level(phase.pcie, demand.pcie_mib_s * 1024, 15.75e6)  # PCIe 3.0 x16
    return Sample(
        at_us,
        level(phase.gpu, demand.gpu_util_pct, 100.0),
        level(phase.memory, demand.mem_access_pct, 100.0),
        0.2 * rx_kb_s,
        rx_kb_s,
        rate,
    )
