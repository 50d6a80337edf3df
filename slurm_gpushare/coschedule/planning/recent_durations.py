"""How long the jobs submitted lately are: what "short" means for a guest."""

from __future__ import annotations

import math

from slurm_gpushare.coschedule.view.snapshot import Occupant, PendingJob, Snapshot

HALF_LIFE_JOBS = 1000


def mean_duration_s(snapshot: Snapshot, gangs: bool) -> float:
    """What plan and reasons go by: the mean of the jobs submitted lately, else of those in the snapshot."""
    mean_s = snapshot.mean_gang_s if gangs else snapshot.mean_duration_s
    if mean_s is not None:
        return mean_s
    known = [s for s in _expected_s(snapshot, gangs).values() if math.isfinite(s)]
    return sum(known) / len(known) if known else 0.0


def _expected_s(snapshot: Snapshot, gangs: bool) -> dict[str, float]:
    """The expected durations of the sharers that wait or run, by key."""
    jobs: list[PendingJob | Occupant] = [*snapshot.pending, *(job for gpu in snapshot.gpus for job in gpu.occupants)]
    return {job.key: job.expected_s for job in jobs if job.token is not None and job.gang is gangs}


class RecentDurations:
    """A running mean of expected durations, each job counted once, old ones fading.

    The jobs in one snapshot alone would mislead: short ones come and go between two looks, long ones stay.
    """

    def __init__(self, *, gangs: bool = False) -> None:
        """Of single GPUs' jobs, or of `gangs`, which are another kind of job."""
        self._gangs = gangs
        self._seen: frozenset[str] = frozenset()
        self._weight = self._sum_s = 0.0

    def mean_s(self, snapshot: Snapshot) -> float | None:
        """The mean after this look; None while no job with a known duration was seen."""
        durations = _expected_s(snapshot, self._gangs)
        keep = 0.5 ** (1.0 / HALF_LIFE_JOBS)
        for key in durations.keys() - self._seen:
            if math.isfinite(durations[key]):
                self._weight = self._weight * keep + 1.0
                self._sum_s = self._sum_s * keep + durations[key]
        self._seen = frozenset(durations)
        return self._sum_s / self._weight if self._weight else None
