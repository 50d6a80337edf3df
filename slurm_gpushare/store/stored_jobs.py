"""Runs: what nodes and users reported, whole runs for learning and interim ones for watching."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, Select, func, or_, select, update

from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import SLACK_S, Decision, StoredJob
from slurm_gpushare.protocol.record import Record, parse_record
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Database, Subject, insert_many
from slurm_gpushare.store.statements import new_row, select_in

Periods = Mapping[int, Sequence[tuple[float, float]]]
"""From when to when a SLURM_JOB_ID meant the job that is asked about: Slurm gives ids anew."""
EVER: Sequence[tuple[float, float]] = ((0.0, float("inf")),)


def within(periods: Periods, job_id: int, at_s: float) -> bool:
    """Whether what happened under this id at that time happened to the job that is meant."""
    return any(start_s - SLACK_S <= at_s <= end_s + SLACK_S for start_s, end_s in periods.get(job_id, ()))


class Jobs:
    """``store.jobs``. One process follows the queue: the helper."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._open: dict[str, StoredJob] | None = None
        """Jobs in the queue, by key; None until they have been read."""

    def follow(self, queue: Iterable[StoredJob], now_s: float) -> dict[str, StoredJob]:
        """Bring the store up to what the queue is now; the jobs in it by key, each with its first submission.

        A job whose tag is gone keeps the one that is known. What has not changed costs nothing.
        """
        if self._open is None:
            with self._db.read() as connection:
                rows = connection.execute(select(schema.job).where(schema.job.c.end_s.is_(None)).order_by(_j.id))
                self._open = {row.job_key: StoredJob(**row._mapping) for row in rows}
        before, now, new, changed = self._open, dict[str, StoredJob](), list[StoredJob](), list[StoredJob]()
        for job in queue:
            known = before.get(job.job_key)
            if known is None or not known.goes_on_as(job):
                if job.tag:
                    new.append(job)
                continue
            job = replace(job, id=known.id, first_submit_s=known.first_submit_s)
            job = job if job.tag else replace(job, tag=known.tag, token=known.token)
            now[job.job_key] = job
            changed += [job] if job != known else []
        again = self._put_back([job for job in new if job.restarts])
        changed += again.values()
        now.update(again)
        changed += [replace(job, end_s=int(now_s)) for key, job in before.items()
                    if key not in now or now[key].id != job.id]  # fmt: skip
        added = [job for job in new if job.job_key not in now]
        if added or changed:
            with self._db.write() as connection:
                insert_many(connection, schema.job, [new_row(job) for job in added])
                for job in changed:
                    connection.execute(update(schema.job).where(_j.id == job.id).values(new_row(job)))
                query = select(schema.job).where(_j.end_s.is_(None)).order_by(_j.id)
                found = select_in(connection, query, _j.job_id, {job.job_id for job in added})
                keys = {job.job_key for job in added}
                now |= {row.job_key: StoredJob(**row._mapping) for row in found if row.job_key in keys}
        self._open = now
        return now

    def take_off(self, keys: Collection[str]) -> None:
        """The tags of these jobs in the queue are gone because we took them off."""
        taken = [self._open[key] for key in keys if self._open and key in self._open]
        with self._db.write() as connection:
            for job in taken:
                connection.execute(update(schema.job).where(_j.id == job.id).values(tag=""))
        self._open = (self._open or {}) | {job.job_key: replace(job, tag="") for job in taken}

    def add_ended(self, jobs: Sequence[StoredJob]) -> None:
        """Keep jobs that ended between two looks at the queue; those that are known stay as they are."""
        with self._db.write() as connection:
            query = select(_j.job_id, _j.submit_s, _j.uid)
            found = select_in(connection, query, _j.job_id, {job.job_id for job in jobs})
            known = {(row.job_id, row.submit_s, row.uid) for row in found}
            new = [job for job in jobs if (job.job_id, job.submit_s, job.uid) not in known]
            insert_many(connection, schema.job, [new_row(job) for job in new])

    def of_ids(self, job_ids: Collection[int]) -> dict[int, list[StoredJob]]:
        """All jobs that had these ids, oldest first."""
        with self._db.read() as connection:
            return _by_id(select_in(connection, select(schema.job).order_by(_j.id), _j.job_id, job_ids))

    def between(self, start_s: float, end_s: float) -> dict[int, list[StoredJob]]:
        """The jobs of a period, by id, oldest first."""
        query = select(schema.job).where(_j.first_submit_s < end_s, or_(_j.end_s.is_(None), _j.end_s > start_s))
        with self._db.read() as connection:
            return _by_id(connection.execute(query.order_by(_j.id)))

    def periods(self, owners: Mapping[int, int]) -> Periods:
        """When these ids meant jobs of those uids. Always, for one whose tag the helper has never met."""
        known = self.of_ids(owners)
        return {
            job_id: [
                (job.first_submit_s, float("inf") if job.end_s is None else job.end_s)
                for job in known[job_id] if job.uid == uid
            ] if job_id in known else EVER
            for job_id, uid in owners.items()
        }  # fmt: skip

    def _put_back(self, jobs: Sequence[StoredJob]) -> dict[str, StoredJob]:
        """Of jobs that come anew with restarts those that were in the queue before, by key."""
        known = self.of_ids({job.job_id for job in jobs}) if jobs else {}
        found = {}
        for job in jobs:
            earlier = [item for item in known.get(job.job_id, ()) if item.goes_on_as(job)]
            if earlier:
                found[job.job_key] = replace(job, id=earlier[-1].id, first_submit_s=earlier[-1].first_submit_s)
        return found


_j = schema.job.c


def _by_id(rows: Iterable[Row[Any]]) -> dict[int, list[StoredJob]]:
    found: dict[int, list[StoredJob]] = {}
    for row in rows:
        found.setdefault(row.job_id, []).append(StoredJob(**row._mapping))
    return found


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One whole run of a workload. `record` is read only on demand: see `Runs.record`."""

    id: int
    settled_seq: int
    """Grows in the order in which runs were given their token."""
    token: str
    job_id: int
    by_node: bool
    node: str
    gpu_index: int
    gpu_model: str
    start_s: float
    end_s: float
    alone_s: float
    shared_s: float
    generation: int | None
    """Of the profile that it is part of; None if of none (shared all the time, or too short)."""


class Runs(Subject):
    """``store.runs``: whole runs whose token is known."""

    def of_tokens(self, tokens: Collection[str], most: int | None = None) -> list[StoredRun]:
        """The runs of these tokens (the latest ones: so many at `most`), in the order in which they ended.

        Those that a node's record outranks are left out.
        """
        query = _KNOWN if most is None else _KNOWN.order_by(_r.end_s.desc(), _r.id.desc()).limit(most)
        with self._db.read() as connection:
            found = list(map(_run, select_in(connection, query, _r.token, tokens)))
        found.sort(key=lambda run: (run.end_s, run.id))
        return found if most is None else found[-most:]

    def of_job(self, job_id: int, periods: Sequence[tuple[float, float]] = EVER) -> list[StoredRun]:
        """The runs of the job that had this id then."""
        found = self._read(_KNOWN.where(_r.job_id == job_id).order_by(_r.id))
        return [run for run in found if within({job_id: periods}, job_id, run.end_s)]

    def after(self, last_seq: int, most: int = 500) -> Iterator[StoredRun]:
        """The first runs whose `settled_seq` is later than `last_seq`: what a learner has not seen yet.

        About so many at `most`: runs of the same `settled_seq` are not parted.
        """
        query = select(_r.settled_seq).where(_r.settled_seq > last_seq).order_by(_r.settled_seq).offset(most).limit(1)
        with self._db.read() as connection:
            last = connection.scalar(query)
        some = _KNOWN if last is None else _KNOWN.where(_r.settled_seq <= last)
        return self._read(some.where(_r.settled_seq > last_seq).order_by(_r.settled_seq, _r.id))

    def between(self, start_s: float, end_s: float) -> Iterator[StoredRun]:
        """Runs that ended in a period."""
        return self._read(_KNOWN.where(_r.end_s >= start_s, _r.end_s < end_s).order_by(_r.end_s))

    def figures_between(self, start_s: float, end_s: float) -> dict[int, RunFigures]:
        """The means that reports add up, of runs that ended in a period, by SLURM_JOB_ID."""
        detail = schema.run_detail.c
        query = (
            select(_r.job_id, _r.gpu_model, _r.alone_s, _r.shared_s, _r.end_s, detail.features)
            .join_from(schema.run, schema.run_detail, _r.id == detail.id)
            .where(_r.state.in_(("counted", "kept")), _r.end_s >= start_s, _r.end_s < end_s)
            .order_by(_r.by_node, _r.end_s)  # what a node says counts more than what its user says, and the last run
        )
        found: dict[int, RunFigures] = {}
        with self._db.read() as connection:
            for row in connection.execute(query):
                features = json.loads(row.features or "{}")
                found[row.job_id] = RunFigures(
                    gpu_model=row.gpu_model,
                    measured_s=row.alone_s + row.shared_s,
                    gpu_busy_pct=features.get("gpu_util_mean_pct"),
                    cpu_cores=None if (cpu_pct := features.get("job_cpu_pct_mean")) is None else cpu_pct / 100.0,
                    power_w=features.get("power_w_mean"),
                    alone_s=row.alone_s,
                    shared_s=row.shared_s,
                    end_s=row.end_s,
                )
        return found

    def record(self, run_id: int) -> Record | None:
        """All numbers of a run; None once they were pruned."""
        with self._db.read() as connection:
            body = connection.scalar(select(schema.run_detail.c.body).where(schema.run_detail.c.id == run_id))
        return None if body is None else parse_record(body)

    def _read(self, query: Select[Any]) -> Iterator[StoredRun]:
        with self._db.read() as connection:
            yield from map(_run, connection.execute(query))


def _run(row: Row[Any]) -> StoredRun:
    return StoredRun(**{**row._mapping, "by_node": bool(row.by_node)})


_r = schema.run.c
_KNOWN: Select[Any] = select(*(_r[name] for name in StoredRun.__slots__)).where(_r.state.in_(("counted", "kept")))


_LIVE = (
    select(_r.job_id, schema.run_detail.c.body)
    .join_from(schema.run, schema.run_detail, _r.id == schema.run_detail.c.id)
    .where(_r.state == schema.RUNNING)
)
_ALIVE = "alive_"


class InterimRecords(Subject):
    """``store.live``: the latest interim record of each running job, and heartbeats."""

    def of_jobs(self, job_ids: Collection[int]) -> dict[int, Record]:
        """The latest interim record by job; a job without one is absent."""
        with self._db.read() as connection:
            found = select_in(connection, _LIVE.order_by(_r.end_s), _r.job_id, job_ids)
            return {row.job_id: parse_record(row.body) for row in found}

    def since(self, at_s: float) -> list[Record]:
        """Interim records made at `at_s` or later."""
        with self._db.read() as connection:
            return [parse_record(row.body) for row in connection.execute(_LIVE.where(_r.end_s >= at_s))]

    def beat(self, name: str = "helper", at_s: float | None = None) -> None:
        """Say that `name` is alive."""
        with self._db.write() as connection:
            statements.put(connection, _ALIVE + name, int(time.time() if at_s is None else at_s))

    def heartbeat_s(self, name: str = "helper") -> int | None:
        """When `name` was last alive; None if never."""
        with self._db.read() as connection:
            return statements.get(connection, _ALIVE + name) or None


COUNTED = "decision_"
"""Start of the counters' names; they outlive pruned decisions, as metrics must."""


_d = schema.decision.c
_OWNERS: Select[Any] = select(schema.decision).where(_d.kind.not_in((schema.STRIKE, schema.BROKEN)))


class Decisions(Subject):
    """``store.decisions``."""

    def add(self, decisions: Collection[Decision]) -> None:
        """Record a tick's decisions in one transaction."""
        if not decisions:
            return
        with self._db.write() as connection:
            connection.execute(schema.decision.insert(), [_decision_row(decision) for decision in decisions])
            kinds = Counter(decision.kind for decision in decisions)
            statements.add(connection, {f"{COUNTED}{kind}": count for kind, count in kinds.items()})

    def of_jobs(self, periods: Periods) -> list[Decision]:
        """The decisions about jobs that had these ids then, oldest first."""
        with self._db.read() as connection:
            rows = select_in(connection, _OWNERS.order_by(_d.id), _d.job_id, periods)
            return [_decision(row) for row in rows if within(periods, row.job_id, row.at_s)]

    def of_kind(self, kind: str, since_s: float, after: int = 0, most: int = 50_000) -> tuple[list[Decision], int]:
        """Those of one kind since a time, oldest first, that came after the decision numbered `after`; the last number.

        Who asks again with that number reads only what is new. Of more than `most` the last count.
        """
        query = _OWNERS.where(_d.id > after, _d.kind == kind, _d.at_s >= since_s).order_by(_d.id.desc())
        with self._db.read() as connection:
            last = connection.scalar(select(func.max(_d.id))) or 0
            return [_decision(row) for row in connection.execute(query.limit(most))][::-1], last

    def between(self, start_s: float, end_s: float) -> Iterator[Decision]:
        """The decisions of a period, oldest first."""
        query = _OWNERS.where(_d.at_s >= start_s, _d.at_s < end_s).order_by(_d.at_s, _d.id)
        with self._db.read() as connection:
            yield from map(_decision, connection.execute(query))


def _decision(row: Row[Any]) -> Decision:
    values = {name: getattr(row, name) for name in Decision.__slots__}
    return Decision(**values | {"reasons": json.loads(row.reasons)})


def _decision_row(decision: Decision) -> dict[str, Any]:
    reasons = json.dumps(dict(decision.reasons), separators=(",", ":"), allow_nan=False)
    return {name: getattr(decision, name) for name in Decision.__slots__} | {"reasons": reasons}
