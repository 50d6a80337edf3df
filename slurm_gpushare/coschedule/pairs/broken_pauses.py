"""Paused jobs that run all the same.

Whoever has another job on the node, or a login there, can let the paused one go on (``kill -CONT``), and Slurm does
not notice. What a node measures of the job shows it: a job that stands still uses no GPU. The first record that ends
in the pause is what later ones are compared with, so that work done before the pause does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_gpushare.coschedule.pairs.final_records import ACTIVITY
from slurm_gpushare.coschedule.pairs.measuring import Tally
from slurm_gpushare.coschedule.pairs.past_profile import LEAST_SAMPLES
from slurm_gpushare.telemetry.record import Record

ACTIVE_PCT = 5.0
"""Mean activity of its own processes from which on a job does not stand still."""
SETTLE_S = 3.0
"""After the signal, kernels that were launched before it run to their end."""


@dataclass(frozen=True, slots=True)
class _InPause:
    """What a job had done by the first record of a pause."""

    run_id: str
    since_s: int
    seq: int
    before: Tally


class PauseCheck:
    """Follows paused jobs from interim record to interim record."""

    def __init__(self) -> None:
        self._jobs: dict[int, _InPause] = {}

    def look(self, records: Iterable[Record], paused_since_s: Mapping[int, int]) -> dict[int, float]:
        """Jobs that were at work in their pause, with their mean activity in per cent."""
        self._jobs = {job: seen for job, seen in self._jobs.items() if paused_since_s.get(job) == seen.since_s}
        found: dict[int, float] = {}
        for record in sorted(records, key=lambda record: record.seq):
            since_s = paused_since_s.get(record.job_id)
            if since_s is None or record.end_s < since_s + SETTLE_S:
                continue
            now, seen = Tally.of(ACTIVITY, record.alone, record.shared), self._jobs.get(record.job_id)
            if seen is None or seen.run_id != record.run_id:
                self._jobs[record.job_id] = _InPause(record.run_id, since_s, record.seq, now)
            elif record.seq > seen.seq and now.n - seen.before.n >= LEAST_SAMPLES:
                mean_pct = now.since(seen.before)
                if mean_pct is not None and mean_pct > ACTIVE_PCT:
                    found[record.job_id] = mean_pct
        return found
