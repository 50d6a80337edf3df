"""Runs: what nodes and users reported, whole runs for learning and interim ones for watching."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, func, select

from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import Record, parse_record
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Subject
from slurm_gpushare.store.known_jobs import EVER, Periods, within
from slurm_gpushare.store.statements import select_in


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

    def of_tokens(self, tokens: Collection[str], since_s: float = 0.0) -> list[StoredRun]:
        """The runs of these tokens that ended at `since_s` or later, oldest first.

        Those that a node's record outranks are left out.
        """
        with self._db.read() as connection:
            found = list(map(_run, select_in(connection, _KNOWN.where(_r.end_s >= since_s), _r.token, tokens)))
        return sorted(found, key=lambda run: (run.end_s, run.id))

    def of_job(self, job_id: int, periods: Sequence[tuple[float, float]] = EVER) -> list[StoredRun]:
        """The runs of the job that had this id then."""
        found = self._read(_KNOWN.where(_r.job_id == job_id).order_by(_r.id))
        return [run for run in found if within({job_id: periods}, job_id, run.end_s)]

    def after(self, last_seq: int) -> Iterator[StoredRun]:
        """Runs whose `settled_seq` is later than `last_seq`: what a learner has not seen yet."""
        return self._read(_KNOWN.where(_r.settled_seq > last_seq).order_by(_r.settled_seq, _r.id))

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
