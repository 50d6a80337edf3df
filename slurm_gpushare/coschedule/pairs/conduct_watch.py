"""Running jobs that are past their profile: found, written down, and measured anew before they share again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.acting import explain
from slurm_gpushare.coschedule.pairs.broken_pauses import PauseCheck
from slurm_gpushare.coschedule.pairs.ledger import Pair, PairKey
from slurm_gpushare.coschedule.pairs.past_profile import MEMORY, Excess, ProfileCheck
from slurm_gpushare.coschedule.view.taking_part import token_of
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.conduct import Strike
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.runs import StoredRun
from slurm_gpushare.telemetry.record import Record

KIND = "past-profile"
"""Of the decision that says so."""
RAN_ON = "ran-while-paused"
"""Of the decision about a paused job that was at work."""
PAUSED = "paused"
"""Of its strike, in place of a feature's name."""
PROGRESS = "conduct"
"""Under which name the store keeps how far runs that ended were looked at."""


class ConductWatch:
    """Compares every running job that may share with its profile, as interim records come in."""

    def __init__(self, store: Store, headroom_pct: float) -> None:
        self._store = store
        self._check = ProfileCheck(headroom_pct)
        self._pauses = PauseCheck()
        self.ran_on: set[int] = set()
        """Running jobs that were at work while they were paused: pausing them is of no use."""
        progress = store.knowledge.get(PROGRESS) or {}
        self._last_run = int(progress.get("last_run", 0))

    def look(
        self, jobs: Iterable[Job], records: Sequence[Record], pairs: Mapping[PairKey, Pair], now_s: float
    ) -> list[Decision]:
        """Jobs that are newly past their profile become strikes; returns what is noted about them."""
        if not records:
            return []
        running = {job.raw_id: job for job in jobs if job.running and token_of(job)}
        profiles = self._store.profiles.by_model({token_of(job) or "" for job in running.values()})
        models = {record.job_id: record.gpu_model or "" for record in records}
        by_job = {}
        for raw_id, job in running.items():
            token = token_of(job) or ""
            # A job without a new record is only to be remembered: any of its profiles will do.
            here = [profiles.get(models[raw_id], {})] if raw_id in models else list(profiles.values())
            profile = next((found[token] for found in here if token in found), None)
            if profile is not None and profile.owner_uid == job.uid:
                by_job[raw_id] = profile
        beside = {own.raw_id: other for pair in pairs.values() for own, other in pair.sides}
        found = [(running[raw_id], excess) for raw_id, excess in self._check.look(records, by_job).items()]
        self._store.conduct.strike([_strike(job, beside.get(job.raw_id), why, now_s) for job, why in found])
        for job, why in found:
            if why.feature == MEMORY:
                self._store.workloads.raise_memory(token_of(job) or "", int(why.seen) + 1)
            other = beside.get(job.raw_id)
            log.warning(KIND, job=job.key, uid=job.uid, beside=other.key if other else None, why=str(why))
        return [
            explain.noted(job, KIND, now_s, beside.get(job.raw_id), feature=why.feature,
                          seen=round(why.seen, 1), profiled=round(why.profiled, 1))
            for job, why in found
        ]  # fmt: skip

    def look_at_paused(
        self, jobs: Iterable[Job], records: Sequence[Record], pairs: Mapping[PairKey, Pair], now_s: float
    ) -> list[Decision]:
        """Paused jobs that were at work become strikes; returns what is noted about them."""
        running = {job.raw_id: job for job in jobs if job.running}
        self.ran_on &= running.keys()
        paused = {raw_id: job for raw_id, job in running.items() if job.paused and raw_id not in self.ran_on}
        since_s = {raw_id: job.tag.paused.since_s for raw_id, job in paused.items() if job.tag and job.tag.paused}
        beside = {own.raw_id: other for pair in pairs.values() for own, other in pair.sides}
        decisions: list[Decision] = []
        for raw_id, active_pct in self._pauses.look(records, since_s).items():
            job, other, why = paused[raw_id], beside.get(raw_id), Excess(PAUSED, active_pct, 0.0)
            self.ran_on.add(raw_id)
            self._store.conduct.strike([_strike(job, other, why, now_s)])
            log.warning(RAN_ON, job=job.key, uid=job.uid, beside=other.key if other else None, active_pct=active_pct)
            decisions.append(explain.noted(job, RAN_ON, now_s, other, seen=round(active_pct, 1)))
        return decisions

    def ended(self, now_s: float) -> list[Decision]:
        """Jobs past their profile, of runs beside somebody that were over before two interim records told of them.

        Memory needs no look here: a run that has ended raises its profile's peak.
        """
        found: list[tuple[StoredRun, int, Excess, int | None]] = []
        new = list(self._store.runs.after(self._last_run))
        for run in new:
            self._last_run = max(self._last_run, run.settled_seq)
            if not run.by_node or run.shared_s <= 0.0:
                continue
            record, profile = self._store.runs.record(run.id), self._store.profiles.get(run.token)
            if record is not None and profile is not None and (why := self._check.ended(record, profile)):
                beside = max(record.neighbours, key=lambda item: item.seconds, default=None)
                found.append((run, profile.owner_uid, why, beside.job_id if beside else None))
        if new:
            self._store.knowledge.put({PROGRESS: {"last_run": self._last_run}})
        self._store.conduct.strike(
            [
                Strike(uid, run.token, run.job_id, int(now_s), why.feature, why.seen, why.profiled, partner)
                for run, uid, why, partner in found
            ]
        )
        for run, uid, why, partner in found:
            log.warning(KIND, job=run.job_id, uid=uid, beside=partner, why=str(why), ended=True)
        return [
            Decision(
                run.job_id, int(now_s), KIND, run.node, run.gpu_index, partner,
                reasons={"key": str(run.job_id), "feature": why.feature, "seen": round(why.seen, 1),
                         "profiled": round(why.profiled, 1)},
            )
            for run, _, why, partner in found
        ]  # fmt: skip


def _strike(job: Job, other: Job | None, why: Excess, now_s: float) -> Strike:
    return Strike(
        uid=job.uid,
        token=token_of(job) or "",
        job_id=job.raw_id,
        at_s=int(now_s),
        feature=why.feature,
        seen=why.seen,
        profiled=why.profiled,
        partner_job=other.raw_id if other else None,
    )
