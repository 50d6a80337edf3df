"""What was seen of jobs that shared: observed rates, spans of sharing, and pairs that are kept apart for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, and_, bindparam, delete, or_, select, update

from slurm_gpushare.protocol.history import Span
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Subject, insert_many
from slurm_gpushare.store.schema import BROKEN, STRIKE
from slurm_gpushare.store.statements import new_row, select_in
from slurm_gpushare.store.stored_jobs import EVER, Periods, within
from slurm_gpushare.store.workloads import measure_anew, to_measure


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


class Observations(Subject):
    """``store.observations``."""

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
                    connection.execute(o.insert().values(new_row(item)))
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


class SharingSpans(Subject):
    """``store.sharing``."""

    def begin(self, spans: Collection[Span]) -> None:
        """Record that sharing began; what is known already is left as it is."""
        earlier = self.of_jobs({span.guest_job: EVER for span in spans})
        known = {(span.resident_job, span.guest_job, span.start_s) for span in earlier}
        new = {(span.resident_job, span.guest_job, span.start_s): span for span in spans}
        rows = [new_row(span) for key, span in new.items() if key not in known]
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

    def of_jobs(self, periods: Periods, since_s: float = 0.0) -> list[Span]:
        """Spans of jobs that had these ids then, and that had not ended at `since_s`; in order of their start."""
        s = schema.sharing.c
        query = select(schema.sharing).where(or_(s.end_s.is_(None), s.end_s > since_s))
        with self._db.read() as connection:
            rows = (
                row
                for side in (s.resident_job, s.guest_job)
                for row in select_in(connection, query, side, periods)
                if within(periods, row._mapping[side.name], row.start_s)
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
        statement = update(schema.sharing).where(schema.sharing.c.id == bindparam("b_id"))
        with self._db.write() as connection:
            connection.execute(statement, [{"b_id": key, column: value} for key, value in values.items()])

    def _spans(self, query: Select[Any]) -> Iterator[Span]:
        with self._db.read() as connection:
            yield from (Span(**row._mapping) for row in connection.execute(query))


_T = TypeVar("_T", "Strike", "BrokenPromise")
STRIKES = "strikes"
BROKEN_PROMISES = "broken_promises"


@dataclass(frozen=True, slots=True)
class Strike:
    """A running job was past its token's profile."""

    uid: int
    token: str
    job_id: int
    at_s: int
    feature: str
    """Which number, by its name in the profile."""
    seen: float
    profiled: float
    partner_job: int | None = None
    """Who was on the card beside it."""


@dataclass(frozen=True, slots=True)
class StrikeCount:
    """The strikes of one user."""

    uid: int
    strikes: int
    tokens: int
    last_s: int


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A job was slowed past what it was promised, beside another."""

    at_s: int
    job_id: int
    uid: int
    by_job: int
    by_uid: int
    node: str
    gpu_index: int
    promised_pct: float
    slowed_pct: float


class Violations(Subject):
    """``store.violations``: decisions that name other users, for administrators."""

    def strike(self, strikes: Collection[Strike]) -> None:
        """Record strikes; from now on their tokens share only after a run on a whole card."""
        if not strikes:
            return
        with self._db.write() as connection:
            _keep(connection, STRIKE, strikes)
            statements.add(connection, {STRIKES: len(strikes)})
            measure_anew(connection, {item.token: item.at_s for item in strikes})

    def to_measure(self) -> frozenset[str]:
        """Tokens that must be measured anew before they share."""
        with self._db.read() as connection:
            return frozenset(to_measure(connection))

    def strikes(self, since_s: float = 0.0) -> list[Strike]:
        """Everybody's strikes, oldest first."""
        return self._kept(Strike, STRIKE, since_s)

    def strikes_by_uid(self, since_s: float = 0.0) -> list[StrikeCount]:
        """Who had strikes, the most first."""
        by_uid: dict[int, list[Strike]] = {}
        for item in self.strikes(since_s):
            by_uid.setdefault(item.uid, []).append(item)
        counts = [
            StrikeCount(uid, len(items), len({item.token for item in items}), max(item.at_s for item in items))
            for uid, items in by_uid.items()
        ]
        return sorted(counts, key=lambda count: (-count.strikes, count.uid))

    def broke(self, promises: Collection[BrokenPromise]) -> None:
        """Record promises that were broken, for the audit trail."""
        if not promises:
            return
        with self._db.write() as connection:
            _keep(connection, BROKEN, promises)
            statements.add(connection, {BROKEN_PROMISES: len(promises)})

    def broken_promises(self, since_s: float = 0.0) -> list[BrokenPromise]:
        """The audit trail, oldest first."""
        return self._kept(BrokenPromise, BROKEN, since_s)

    def _kept(self, of: type[_T], kind: str, since_s: float) -> list[_T]:
        d = schema.decision
        query = select(d).where(d.c.kind == kind, d.c.at_s >= since_s).order_by(d.c.id)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        found = ({**row._mapping, "by_job": row.partner_job, **json.loads(row.reasons)} for row in rows)
        names = [field.name for field in fields(of)]
        return [of(**{name: kept[name] for name in names}) for kept in found]


def _keep(connection: Connection, kind: str, items: Collection[Strike | BrokenPromise]) -> None:
    """What is no column of ``decision`` stands in its `reasons`."""
    rows = []
    for item in items:
        values = asdict(item)
        partner = values.pop("partner_job", None) or values.pop("by_job", None)
        row = {name: values.pop(name, None) for name in ("job_id", "at_s", "node", "gpu_index")}
        rows.append({**row, "kind": kind, "partner_job": partner, "reasons": json.dumps(values)})
    insert_many(connection, schema.decision, rows)
