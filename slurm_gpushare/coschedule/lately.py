"""How long the jobs submitted lately are: what "short" means for a guest."""

from __future__ import annotations

import math

from slurm_gpushare.coschedule.halves import expected_s
from slurm_gpushare.coschedule.snapshot import Snapshot

HALF_LIFE_JOBS = 1000


class Lately:
    """A running mean of expected durations, each job counted once, old ones fading.

    The jobs in one snapshot alone would mislead: short ones come and go between two looks, long ones stay.
    """

    def __init__(self) -> None:
        self._seen: frozenset[str] = frozenset()
        self._weight = self._sum_s = 0.0

    def mean_s(self, snapshot: Snapshot, limit_use: float) -> float | None:
        """The mean after this look; None while no job with a known duration was seen."""
        jobs = [job for job in snapshot.pending if job.token is not None]
        durations = {job.job_id: expected_s(job, limit_use) for job in jobs}
        occupants = [job for gpu in snapshot.gpus for job in gpu.occupants if job.token is not None]
        durations.update((job.job_id, expected_s(job, limit_use)) for job in occupants)
        keep = 0.5 ** (1.0 / HALF_LIFE_JOBS)
        for job_id in durations.keys() - self._seen:
            if math.isfinite(durations[job_id]):
                self._weight = self._weight * keep + 1.0
                self._sum_s = self._sum_s * keep + durations[job_id]
        self._seen = frozenset(durations)
        return self._sum_s / self._weight if self._weight else None
