"""What an emulated job's load looks like over an epoch: loading, training, validation, and noise."""

from __future__ import annotations

import random
from dataclasses import dataclass

from slurm_gpushare.testbed.emulator.card import Demand, Sample


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


def phase_at(epoch_fraction: float) -> Phase:
    """The part of the epoch that a job is in."""
    return next((phase for phase in PHASES if epoch_fraction < phase.until), PHASES[-1])


def mean_share() -> float:
    """Mean GPU utilisation over an epoch, alone, as a share of the stated demand."""
    begins = (0.0, *(phase.until for phase in PHASES))
    return sum((phase.until - begin) * phase.gpu for phase, begin in zip(PHASES, begins, strict=False))


def sample(demand: Demand, epoch_fraction: float, rate: float, at_us: int, noise: random.Random) -> Sample:
    """The job's own load now: a job that is slowed keeps the GPU busy less, in proportion."""
    phase = phase_at(epoch_fraction)

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
