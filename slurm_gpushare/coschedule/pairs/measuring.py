"""How fast two jobs run beside each other, as their nodes measure it.

A job's own share of the GPU's time, while shared over while alone, is how fast it runs: the same work needs the same
time on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_gpushare.coschedule.pairs.final_records import (
    ACTIVITY,
    ACTIVITY_MEAN,
    ENOUGH,
    LEAST_ERROR,
    MIN_ACTIVITY_PCT,
    activity_alone,
    relative_error,
)
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Period, Record


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
    alone = activity_alone(record, profile.features.get(ACTIVITY_MEAN) if profile else None, least=ENOUGH)
    now = Tally.of(ACTIVITY, record.shared)
    n, shared_pct = now.n - before.n, now.since(before)
    if alone is None or shared_pct is None or n < ENOUGH or alone.pct < MIN_ACTIVITY_PCT:
        return None
    rate = min(1.0, max(0.02, shared_pct / alone.pct))
    shared_error = relative_error(record.shared.stats[ACTIVITY], n)
    return MeasuredRate(rate, rate * math.hypot(shared_error, alone.error, LEAST_ERROR))
