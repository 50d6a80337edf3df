"""What the helper decided about each job and why: the memory behind ``gpushare job ID``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from sqlalchemy import Row, func, select

from slurm_gpushare.history import Decision as Decision
from slurm_gpushare.store import counters, schema
from slurm_gpushare.store.chunks import select_in
from slurm_gpushare.store.database import Database

COUNTED = "decision_"
"""Start of the counters' names; they outlive pruned decisions, as metrics must."""


class Decisions:
    """``store.decisions``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, decisions: Collection[Decision]) -> None:
        """Record a tick's decisions in one transaction."""
        if not decisions:
            return
        with self._db.write() as connection:
            connection.execute(schema.decision.insert(), [_row(decision) for decision in decisions])
            kinds = Counter(decision.kind for decision in decisions)
            counters.add(connection, {f"{COUNTED}{kind}": count for kind, count in kinds.items()})

    def of_job(self, job_id: int) -> list[Decision]:
        """The job's decisions, oldest first."""
        return self.of_jobs([job_id])

    def of_jobs(self, job_ids: Collection[int]) -> list[Decision]:
        """The decisions about any of these jobs, oldest first."""
        d = schema.decision
        with self._db.read() as connection:
            return list(map(_decision, select_in(connection, select(d).order_by(d.c.id), d.c.job_id, job_ids)))

    def of_kind(self, kind: str, since_s: float, after: int = 0, most: int = 50_000) -> tuple[list[Decision], int]:
        """Those of one kind since a time, oldest first, that came after the decision numbered `after`; the last number.

        Who asks again with that number reads only what is new. Of more than `most` the last count.
        """
        d = schema.decision
        query = select(d).where(d.c.id > after, d.c.kind == kind, d.c.at_s >= since_s).order_by(d.c.id.desc())
        with self._db.read() as connection:
            last = connection.scalar(select(func.max(d.c.id))) or 0
            return [_decision(row) for row in connection.execute(query.limit(most))][::-1], last

    def between(self, start_s: float, end_s: float) -> Iterator[Decision]:
        """The decisions of a period, oldest first."""
        d = schema.decision
        query = select(d).where(d.c.at_s >= start_s, d.c.at_s < end_s).order_by(d.c.at_s, d.c.id)
        with self._db.read() as connection:
            yield from map(_decision, connection.execute(query))


def _decision(row: Row[Any]) -> Decision:
    values = {name: getattr(row, name) for name in Decision.__slots__}
    return Decision(**values | {"reasons": json.loads(row.reasons)})


def _row(decision: Decision) -> dict[str, Any]:
    reasons = json.dumps(dict(decision.reasons), separators=(",", ":"), allow_nan=False)
    return {name: getattr(decision, name) for name in Decision.__slots__} | {"reasons": reasons}
