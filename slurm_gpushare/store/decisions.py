"""What the helper decided about each job and why: the memory behind ``gpushare job ID``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sqlalchemy import Select, select

from slurm_gpushare.store import counters, schema
from slurm_gpushare.store.database import Database

COUNTED = "decision_"
"""Start of the counters' names; they outlive pruned decisions, as metrics must."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about one job."""

    job_id: int
    at_s: int
    kind: str
    """A word of at most 16 letters: ``placed``, ``alone``, ``released``, ``waits``, ``extended``, ``requeued``, ..."""
    node: str | None = None
    gpu_index: int | None = None
    partner_job: int | None = None
    rate: float | None = None
    """Predicted, of this job beside the partner."""
    partner_rate: float | None = None
    reasons: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the decision rested on: numbers, tokens, our own words. JSON."""


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
        d = schema.decision
        return list(self._read(select(d).where(d.c.job_id == job_id).order_by(d.c.id)))

    def between(self, start_s: float, end_s: float) -> Iterator[Decision]:
        """The decisions of a period, oldest first."""
        d = schema.decision
        return self._read(select(d).where(d.c.at_s >= start_s, d.c.at_s < end_s).order_by(d.c.at_s, d.c.id))

    def _read(self, query: Select[Any]) -> Iterator[Decision]:
        with self._db.read() as connection:
            for row in connection.execute(query):
                values = {key: value for key, value in row._mapping.items() if key not in {"id", "reasons"}}
                yield Decision(**values, reasons=json.loads(row.reasons))


def _row(decision: Decision) -> dict[str, Any]:
    return {
        "job_id": decision.job_id,
        "at_s": decision.at_s,
        "kind": decision.kind,
        "node": decision.node,
        "gpu_index": decision.gpu_index,
        "partner_job": decision.partner_job,
        "rate": decision.rate,
        "partner_rate": decision.partner_rate,
        "reasons": json.dumps(dict(decision.reasons), separators=(",", ":"), allow_nan=False),
    }
