"""The jobs and the measured pairs of a simulation, read once and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slurm_gpushare.knowledge.rates import Floats, Ints

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
