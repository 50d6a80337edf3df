"""What was seen of jobs that shared: observed rates, spans of sharing, and pairs that are kept apart for a while."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, delete, func, or_, select, update

from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.statements import select_in


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


BAN_S = 14 * 86_400
"""A ban is a strong belief, not a verdict: so long after the last time, two may try again."""
_RENEW_S = 3600


@dataclass(frozen=True, slots=True)
class Ban:
    """Two tokens, in alphabetical order, that broke a promise beside each other."""

    token_a: str
    token_b: str
    at_s: int

    def names(self, tokens: Sequence[str]) -> bool:
        """Whether it keeps this one token from anybody, or these two apart; two may be the same."""
        pair = [self.token_a, self.token_b]
        return sorted(tokens) == pair if len(tokens) == 2 else set(tokens) <= set(pair)

    def left_s(self, now_s: float) -> float:
        """How long it still lasts."""
        return max(0.0, self.at_s + BAN_S - now_s)


class SharingSpans:
    """``store.sharing``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def begin(self, spans: Collection[Span]) -> None:
        """Record that sharing began; what is known already is left as it is."""
        earlier = self.of_jobs({span.guest_job for span in spans})
        known = {(span.resident_job, span.guest_job, span.start_s) for span in earlier}
        new = {(span.resident_job, span.guest_job, span.start_s): span for span in spans}
        rows = [_without_id(span) for key, span in new.items() if key not in known]
        if rows:
            with self._db.write() as connection:
                connection.execute(schema.sharing.insert(), rows)

    def end(self, ended: Mapping[int, int]) -> None:
        """Record when spans ended: {id: end_s}."""
        self._update("end_s", ended)

    def paused(self, paused_s: Mapping[int, int]) -> None:
        """Record for how long one of the two stood still, by span id."""
        self._update("paused_s", paused_s)

    def seen(self, resident_rates: Mapping[int, float], guest_rates: Mapping[int, float]) -> None:
        """Record measured rates, by span id."""
        self._update("resident_rate_seen", resident_rates)
        self._update("guest_rate_seen", guest_rates)

    def open(self) -> list[Span]:
        """Spans that have not ended."""
        return list(self._spans(select(schema.sharing).where(schema.sharing.c.end_s.is_(None))))

    def of_job(self, job_id: int) -> list[Span]:
        return self.of_jobs([job_id])

    def of_jobs(self, job_ids: Collection[int], since_s: float = 0.0) -> list[Span]:
        """Spans of any of these jobs that had not ended at `since_s`, in order of their start."""
        s = schema.sharing.c
        query = select(schema.sharing).where(or_(s.end_s.is_(None), s.end_s > since_s))
        with self._db.read() as connection:
            rows = (
                row for side in (s.resident_job, s.guest_job) for row in select_in(connection, query, side, job_ids)
            )
            found = {row.id: Span(**row._mapping) for row in rows}
        return sorted(found.values(), key=lambda span: (span.start_s, span.id))

    def between(self, start_s: float, end_s: float) -> Iterator[Span]:
        """Spans that overlap a period, in order of their start."""
        s = schema.sharing.c
        overlap = (s.start_s < end_s, or_(s.end_s.is_(None), s.end_s > start_s))
        return self._spans(select(schema.sharing).where(*overlap).order_by(s.start_s))

    def ban(self, token_a: str, token_b: str, now_s: float | None = None) -> None:
        """Keep these two apart: they broke a promise beside each other. It fades, unless it happens again."""
        n, at_s = schema.ban, int(time.time() if now_s is None else now_s)
        a, b = sorted((token_a, token_b))
        here = (n.c.token_a == a, n.c.token_b == b)
        with self._db.write() as connection:
            known = connection.scalar(select(n.c.at_s).where(*here))
            if known is None:
                connection.execute(n.insert().values(token_a=a, token_b=b, at_s=at_s))
            elif at_s - known > _RENEW_S:
                connection.execute(update(n).where(*here).values(at_s=at_s))

    def bans(self, now_s: float) -> list[Ban]:
        """The bans in force, the latest first."""
        n = schema.ban.c
        query = select(n.token_a, n.token_b, n.at_s).where(n.at_s > int(now_s) - BAN_S).order_by(n.at_s.desc())
        with self._db.read() as connection:
            return [Ban(*row) for row in connection.execute(query)]

    def banned(self, now_s: float) -> frozenset[tuple[str, str]]:
        """The pairs that are kept apart now, each in alphabetical order."""
        return frozenset((ban.token_a, ban.token_b) for ban in self.bans(now_s))

    def lift(self, token: str, other: str | None = None) -> int:
        """Let a token sit beside `other` again, or beside anybody; returns how many bans that ended."""
        n = schema.ban.c
        if other is None:
            which = or_(n.token_a == token, n.token_b == token)
        else:  # both may be the same: two jobs of one workload
            a, b = sorted((token, other))
            which = and_(n.token_a == a, n.token_b == b)
        with self._db.write() as connection:
            return connection.execute(delete(schema.ban).where(which)).rowcount

    def _update(self, column: str, values: Mapping[int, float]) -> None:
        if not values:
            return
        s = schema.sharing
        statement = update(s).where(s.c.id == bindparam("b_id")).values({column: bindparam("b_value")})
        with self._db.write() as connection:
            connection.execute(statement, [{"b_id": key, "b_value": value} for key, value in values.items()])

    def _spans(self, query: Select[Any]) -> Iterator[Span]:
        with self._db.read() as connection:
            yield from (Span(**row._mapping) for row in connection.execute(query))


def _without_id(item: Observation | Span) -> dict[str, Any]:
    values = asdict(item)
    del values["id"]
    return values


# What the helper decided about each job and why: the memory behind ``gpushare job ID``.


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
            statements.add(connection, {f"{COUNTED}{kind}": count for kind, count in kinds.items()})

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
