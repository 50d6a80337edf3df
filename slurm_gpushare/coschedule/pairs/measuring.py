"""How fast two jobs run beside each other, as their nodes measure it.

A job's own share of the GPU's time, while shared over while alone, is how fast it runs: the same work needs the same
time on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_gpushare.coschedule.pairs.final_records import (
    ACTIVITY,
    LEAST_ERROR,
    MIN_ACTIVITY_PCT,
    PROFILE_ERROR,
    relative_error,
)
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Period, Record

MIN_SAMPLES = 20
UNLIKE_POINTS = 15.0
"""Activity so far above the profile's, in points of a hundred, is another workload; runs of one differ by less."""
UNLIKE_MEMORY = 1.05


@dataclass(frozen=True, slots=True)
class Tally:
    """Samples of an attribute, up to some moment."""

    n: int = 0
    total: float = 0.0

    @classmethod
    def of(cls, attribute: str, *periods: Period) -> Tally:
        """Of all these periods together."""
        stats = [period.stats[attribute] for period in periods if attribute in period.stats]
        return cls(sum(stat.n for stat in stats), sum(stat.n * stat.mean for stat in stats))

    def since(self, before: Tally) -> float | None:
        """The mean of the samples that came after `before`."""
        return (self.total - before.total) / (self.n - before.n) if self.n > before.n else None


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """A rate, and how far it may be off (one standard deviation)."""

    rate: float
    error: float


def seen_rate(record: Record, before: Tally, profile: Profile | None) -> MeasuredRate | None:
    """How fast the job runs beside its present neighbour; None while too little was seen.

    `before` are the samples of earlier neighbours, which the record sums up with the present one's.
    """
    alone = record.alone.stats.get(ACTIVITY)
    if alone is not None and alone.n >= MIN_SAMPLES:
        alone_pct, alone_error = alone.mean, relative_error(alone, alone.n)
    elif profile is not None and f"{ACTIVITY}_mean" in profile.features:
        alone_pct, alone_error = profile.features[f"{ACTIVITY}_mean"], PROFILE_ERROR
    else:
        return None
    now = Tally.of(ACTIVITY, record.shared)
    n, shared_pct = now.n - before.n, now.since(before)
    if shared_pct is None or n < MIN_SAMPLES or alone_pct < MIN_ACTIVITY_PCT:
        return None
    rate = min(1.0, max(0.02, shared_pct / alone_pct))
    shared_error = relative_error(record.shared.stats[ACTIVITY], n)
    return MeasuredRate(rate, rate * math.hypot(shared_error, alone_error, LEAST_ERROR))


def as_profiled(record: Record | None, profile: Profile | None) -> bool:
    """Whether a running job is what its profile says: no busier, and with no more memory."""
    if record is None or profile is None:
        return True
    used_mib = record.features.mem_used_mib
    if used_mib is not None and used_mib > UNLIKE_MEMORY * profile.mem_used_mib:
        return False
    known = profile.features.get(f"{ACTIVITY}_mean")
    stats = [period.stats.get(ACTIVITY) for period in (record.alone, record.shared)]
    seen = next((stat for stat in stats if stat is not None and stat.n >= MIN_SAMPLES), None)
    return known is None or seen is None or seen.mean <= known + UNLIKE_POINTS
