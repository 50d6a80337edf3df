"""GPU memory, which nothing fences: act as soon as two jobs no longer fit, and learn from those that ran out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.acting import explain
from slurm_gpushare.coschedule.pairs.keeping import Keeper
from slurm_gpushare.coschedule.pairs.ledger import Pair
from slurm_gpushare.coschedule.pairs.measured_pairs import SeenPair
from slurm_gpushare.coschedule.view.observe import View
from slurm_gpushare.coschedule.view.taking_part import token_of
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Record

NEAR_FULL = 0.9
"""Both jobs' memory over the card's: from here on a failure is taken for out-of-memory."""
_FAILED = frozenset({"FAILED", "OUT_OF_MEMORY"})


class MemoryWatch:
    """Compares what jobs hold of a card with what their profiles said."""

    def __init__(self, config: Config, store: Store, slurm: Slurm, keeper: Keeper) -> None:
        self._headroom = config.memory_headroom_pct / 100.0
        self._store = store
        self._slurm = slurm
        self._keeper = keeper
        self._told: set[int] = set()

    def look(
        self, pair: Pair, records: Mapping[int, Record], profiles: Mapping[str, Profile], view: View
    ) -> list[Decision]:
        """Who has outgrown its profile is remembered with what it really needs; if the two no longer fit it must go."""
        decisions: list[Decision] = []
        used = {job.raw_id: _used_mib(records.get(job.raw_id)) for job in (pair.resident, pair.guest)}
        total = max((record.features.mem_total_mib or 0.0 for record in records.values()), default=0.0)
        for job, other in pair.sides:
            profile = profiles.get(token_of(job) or "")
            if profile is None or used[job.raw_id] <= profile.mem_used_mib or job.raw_id in self._told:
                continue
            need, beside = used[job.raw_id], max(used[other.raw_id], _expected_mib(other, profiles))
            self._store.workloads.raise_memory(token_of(job) or "", int(need))  # so nobody joins who would not fit
            if total and need + beside > total * (1.0 - self._headroom):
                self._told.add(job.raw_id)
                decisions += self._outgrown(job, other, need, beside, total, view.now_s)
        return decisions

    def _outgrown(self, job: Job, other: Job, need: float, beside: float, total: float, now_s: float) -> list[Decision]:
        why = f"memory: {need:,.0f} MiB do not fit beside {beside:,.0f} of {total:,.0f}"
        log.warning("memory", job=job.key, beside=other.key, why=why)
        return explain.both(job, other, "outgrown", now_s, why) + self._keeper.requeue(job, other, why, now_s)

    def ended(self, over: Iterable[tuple[Pair, SeenPair]], now_s: float) -> list[Decision]:
        """Raise the memory estimate of a job that failed while the two filled the card."""
        full = [(pair, seen) for pair, seen in over if _filled(pair, seen)]
        if not full:
            return []
        keys = sorted({job.key for pair, _ in full for job in (pair.resident, pair.guest)})
        try:
            states = {job.key: job.state for job in self._slurm.jobs(keys)}
        except SlurmError as error:
            log.warning("ended-jobs", message=error.what)
            return []
        decisions = []
        for pair, seen in full:
            for job, other in pair.sides:
                if states.get(job.key) in _FAILED:
                    need = _needed_mib(seen.records[job.raw_id], seen.records[other.raw_id])
                    self._store.workloads.raise_memory(token_of(job) or "", need)
                    log.warning("out-of-memory", job=job.key, beside=other.key, mem_mib=need)
                    decisions.append(explain.noted(job, "out-of-memory", now_s, other, mem_mib=need))
        return decisions


def _used_mib(record: Record | None) -> float:
    return (record.features.mem_used_mib or 0.0) if record else 0.0


def _expected_mib(job: Job, profiles: Mapping[str, Profile]) -> float:
    profile = profiles.get(token_of(job) or "")
    return float(profile.mem_used_mib) if profile else 0.0


def _filled(pair: Pair, seen: SeenPair) -> bool:
    records = [seen.records.get(job.raw_id) for job in (pair.resident, pair.guest)]
    used = [record.features.mem_used_mib for record in records if record]
    total = max((record.features.mem_total_mib or 0.0 for record in records if record), default=0.0)
    return len(used) == 2 and total > 0 and sum(value or 0.0 for value in used) >= NEAR_FULL * total


def _needed_mib(record: Record, other: Record) -> int:
    """At least what it had, and more than what its neighbour left of the card."""
    total = record.features.mem_total_mib or other.features.mem_total_mib or 0.0
    left = total - (other.features.mem_used_mib or 0.0)
    return int(max(record.features.mem_used_mib or 0.0, left)) + 1
