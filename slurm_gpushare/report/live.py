"""What the store knows of running jobs: their latest telemetry, and what sharing costs them."""

from __future__ import annotations

import time

from slurm_gpushare.report.status import Activity, Cost, Live
from slurm_gpushare.store.store import Store
from slurm_gpushare.telemetry.record import Record

FRESH_S = 120.0


def _activity(record: Record) -> Activity:
    """The job's own share of the card: over its shared time if it ever shared, else alone."""
    period = record.shared if record.neighbours and record.shared.stats else record.alone
    util, memory = period.stats.get("gpu_util_pct"), period.stats.get("gpu_mem_pct")
    return Activity(util.mean if util else None, memory.max if memory else None)


def _isd_pct(rate: float | None) -> float | None:
    return 100 * (1 / rate - 1) if rate else None


def read_live(store: Store, now_s: float | None = None) -> Live:
    """Interim records younger than two minutes, and the spans of sharing that last."""
    now_s = time.time() if now_s is None else now_s
    activity = {record.job_id: _activity(record) for record in store.live.since(now_s - FRESH_S)}
    cost: dict[int, Cost] = {}
    for span in store.sharing.open():
        cost[span.resident_job] = Cost(_isd_pct(span.resident_rate), _isd_pct(span.resident_rate_seen))
        cost[span.guest_job] = Cost(_isd_pct(span.guest_rate), _isd_pct(span.guest_rate_seen))
    return Live(activity, cost)
