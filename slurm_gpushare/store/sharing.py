"""What was seen of jobs that shared: observed rates, spans of sharing, and pairs that must not meet again."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Row, Select, bindparam, or_, select, update

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database


@dataclass(frozen=True, slots=True)
class Observation:
    """`victim` ran at `rate` of its speed alone beside `neighbour`."""

    source: str
    """What was measured: ``elapsed:RUN`` or ``activity:RUN``. The same source counts once."""
    gpu_model: str
    victim: str
    neighbour: str
    rate: float
    weight: float
    """What it is worth against one whose relative error is 5 %: 1 is as much (`Knowledge.observe`)."""
    at_s: int
    id: int = 0
    """Grows; given by the store."""


@dataclass(frozen=True, slots=True)
class Span:
    """Two jobs on one card, from `start_s` to `end_s` (None: still)."""

    resident_job: int
    guest_job: int
    resident_token: str
    guest_token: str
    node: str
    gpu_index: int
    gpu_model: str
    start_s: int
    end_s: int | None = None
    resident_rate: float | None = None
    """Predicted."""
    guest_rate: float | None = None
    resident_rate_seen: float | None = None
    guest_rate_seen: float | None = None
    id: int = 0


class Observations:
    """``store.observations``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, observations: Collection[Observation]) -> int:
        """Keep observations; those whose source is known already are left out. Returns how many were new."""
        o = schema.observation
        added = 0
        with self._db.write() as connection:
            seen: set[str] = set()
            for item in observations:
                known = connection.scalar(select(o.c.id).where(o.c.source == item.source))
                if known is None and item.source not in seen:
                    seen.add(item.source)
                    connection.execute(o.insert().values(_without_id(item)))
                    added += 1
        return added

    def after(self, last_id: int, limit: int = 100_000) -> list[Observation]:
        """Observations later than `last_id`, oldest first: what a learner has not seen yet."""
        o = schema.observation
        with self._db.read() as connection:
            rows = connection.execute(select(o).where(o.c.id > last_id).order_by(o.c.id).limit(limit))
            return [Observation(**row._mapping) for row in rows]


class Sharing:
    """``store.sharing``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def begin(self, spans: Collection[Span]) -> None:
        """Record that sharing began; what is known already is left as it is."""
        s = schema.sharing
        with self._db.write() as connection:
            for span in spans:
                same = (
                    s.c.resident_job == span.resident_job,
                    s.c.guest_job == span.guest_job,
                    s.c.start_s == span.start_s,
                )
                if connection.scalar(select(s.c.id).where(*same)) is None:
                    connection.execute(s.insert().values(_without_id(span)))

    def end(self, ended: Mapping[int, int]) -> None:
        """Record when spans ended: {id: end_s}."""
        self._update("end_s", ended)

    def seen(self, resident_rates: Mapping[int, float], guest_rates: Mapping[int, float]) -> None:
        """Record measured rates, by span id."""
        self._update("resident_rate_seen", resident_rates)
        self._update("guest_rate_seen", guest_rates)

    def open(self) -> list[Span]:
        """Spans that have not ended."""
        return list(self._spans(select(schema.sharing).where(schema.sharing.c.end_s.is_(None))))

    def of_job(self, job_id: int) -> list[Span]:
        s = schema.sharing
        return list(self._spans(select(s).where(or_(s.c.resident_job == job_id, s.c.guest_job == job_id))))

    def between(self, start_s: float, end_s: float) -> Iterator[Span]:
        """Spans that overlap a period, in order of their start."""
        s = schema.sharing.c
        overlap = (s.start_s < end_s, or_(s.end_s.is_(None), s.end_s > start_s))
        return self._spans(select(schema.sharing).where(*overlap).order_by(s.start_s))

    def forbid(self, token_a: str, token_b: str) -> None:
        """Never put these two on one card again."""
        n = schema.never_pair
        a, b = sorted((token_a, token_b))
        with self._db.write() as connection:
            if connection.scalar(select(n.c.at_s).where(n.c.token_a == a, n.c.token_b == b)) is None:
                connection.execute(n.insert().values(token_a=a, token_b=b, at_s=int(time.time())))

    def forbidden(self) -> frozenset[tuple[str, str]]:
        """Pairs that `forbid` was called for, each in alphabetical order."""
        n = schema.never_pair.c
        with self._db.read() as connection:
            return frozenset((a, b) for a, b in connection.execute(select(n.token_a, n.token_b)))

    def _update(self, column: str, values: Mapping[int, float]) -> None:
        if not values:
            return
        s = schema.sharing
        statement = update(s).where(s.c.id == bindparam("b_id")).values({column: bindparam("b_value")})
        with self._db.write() as connection:
            connection.execute(statement, [{"b_id": key, "b_value": value} for key, value in values.items()])

    def _spans(self, query: Select[Any]) -> Iterator[Span]:
        with self._db.read() as connection:
            yield from (_span(row) for row in connection.execute(query))


def _span(row: Row[Any]) -> Span:
    return Span(**row._mapping)


def _without_id(item: Observation | Span) -> dict[str, Any]:
    values = asdict(item)
    del values["id"]
    return values
