"""What the store knows of running jobs: their latest telemetry, and what sharing costs them."""

from __future__ import annotations

import time

from slurm_gpushare.history import sides_by_job
from slurm_gpushare.report.status import Activity, Cost, LiveFigures
from slurm_gpushare.store.store import Store
from slurm_gpushare.telemetry.record import Record

FRESH_S = 120.0


def _activity(record: Record) -> Activity:
    """The job's own share of the card: over its shared time if it ever shared, else alone."""
    period = record.shared if record.neighbours and record.shared.stats else record.alone
    util, memory = period.stats.get("gpu_util_pct"), period.stats.get("gpu_mem_pct")
    return Activity(util.mean if util else None, memory.max if memory else None)


def read_live(store: Store) -> LiveFigures:
    """Interim records younger than two minutes, and the spans of sharing that last."""
    activity = {record.job_id: _activity(record) for record in store.live.since(time.time() - FRESH_S)}
    sides = sides_by_job(store.sharing.open())
    cost = {job: Cost(side.expected_isd_pct, side.measured_isd_pct) for job, side in sides.items()}
    counts = store.counters.all()
    if "cards_won" not in counts and "cards_lost" not in counts:
        return LiveFigures(activity, cost)
    won, lost, hold_ms = (counts.get(name, 0) for name in ("cards_won", "cards_lost", "hold_ms"))
    return LiveFigures(activity, cost, won, lost, hold_ms / 1000.0)
