"""Runs: what nodes and users reported, whole runs for learning and interim ones for watching."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, delete, select

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database
from slurm_gpushare.telemetry.record import Record, parse_record

_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Run:
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


class Runs:
    """``store.runs``: whole runs whose token is known."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of_token(self, token: str) -> list[Run]:
        """The token's runs, oldest first; those that a node's record outranks are left out."""
        return list(self._read(_KNOWN.where(_r.token == token).order_by(_r.id)))

    def of_job(self, job_id: int) -> list[Run]:
        return list(self._read(_KNOWN.where(_r.job_id == job_id).order_by(_r.id)))

    def after(self, last_seq: int) -> Iterator[Run]:
        """Runs whose `settled_seq` is later than `last_seq`: what a learner has not seen yet."""
        return self._read(_KNOWN.where(_r.settled_seq > last_seq).order_by(_r.settled_seq, _r.id))

    def between(self, start_s: float, end_s: float) -> Iterator[Run]:
        """Runs that ended in a period."""
        return self._read(_KNOWN.where(_r.end_s >= start_s, _r.end_s < end_s).order_by(_r.end_s))

    def record(self, run_id: int) -> Record | None:
        """All numbers of a run; None once they were pruned."""
        with self._db.read() as connection:
            body = connection.scalar(select(schema.run_detail.c.body).where(schema.run_detail.c.id == run_id))
        return None if body is None else parse_record(body)

    def _read(self, query: Select[Any]) -> Iterator[Run]:
        with self._db.read() as connection:
            for row in connection.execute(query):
                yield Run(**{**row._mapping, "by_node": bool(row.by_node)})


_r = schema.run.c
_KNOWN: Select[Any] = select(
    _r.id, _r.settled_seq, _r.token, _r.job_id, _r.by_node, _r.node, _r.gpu_index, _r.gpu_model, _r.start_s, _r.end_s,
    _r.alone_s, _r.shared_s, _r.generation,
).where(_r.state.in_(("counted", "kept")))  # fmt: skip


class Live:
    """``store.live``: the latest interim record of each running job, and heartbeats."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of_jobs(self, job_ids: Collection[int]) -> dict[int, Record]:
        """The latest interim record by job; a job without one is absent."""
        i, wanted = schema.interim.c, sorted(job_ids)
        found: dict[int, Record] = {}
        with self._db.read() as connection:
            for at in range(0, len(wanted), _CHUNK):
                query = select(i.job_id, i.body).where(i.job_id.in_(wanted[at : at + _CHUNK])).order_by(i.at_s)
                found.update((row.job_id, parse_record(row.body)) for row in connection.execute(query))
        return found

    def since(self, at_s: float) -> list[Record]:
        """Interim records made at `at_s` or later."""
        i = schema.interim.c
        with self._db.read() as connection:
            return [parse_record(body) for body in connection.scalars(select(i.body).where(i.at_s >= at_s))]

    def beat(self, name: str = "helper", at_s: float | None = None) -> None:
        """Say that `name` is alive."""
        h = schema.heartbeat
        with self._db.write() as connection:
            connection.execute(delete(h).where(h.c.name == name))
            connection.execute(h.insert().values(name=name, at_s=int(time.time() if at_s is None else at_s)))

    def heartbeat_s(self, name: str = "helper") -> int | None:
        """When `name` was last alive; None if never."""
        with self._db.read() as connection:
            return connection.scalar(select(schema.heartbeat.c.at_s).where(schema.heartbeat.c.name == name))
