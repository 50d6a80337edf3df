"""Strikes by user, tokens that must be measured again, and promises that were broken.

Nobody is punished here: administrators read it, and a token that is no longer what was measured shares again once
a node has measured it on a whole card.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, func, select

from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.statements import delete_in, select_in
from slurm_gpushare.store.workloads import touch

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


class Conduct:
    """``store.conduct``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def strike(self, strikes: Collection[Strike]) -> None:
        """Record strikes; from now on their tokens share only after a run on a whole card."""
        if not strikes:
            return
        with self._db.write() as connection:
            insert_many(connection, schema.strike, [asdict(item) for item in strikes])
            statements.add(connection, {STRIKES: len(strikes)})
            _measure_anew(connection, {item.token: item.at_s for item in strikes})

    def to_measure(self) -> frozenset[str]:
        """Tokens that must be measured anew before they share."""
        with self._db.read() as connection:
            return frozenset(to_measure(connection))

    def strikes_by_uid(self, since_s: float = 0.0) -> list[StrikeCount]:
        """Who had strikes, the most first."""
        s = schema.strike.c
        count = func.count()
        query = (
            select(s.uid, count, func.count(s.token.distinct()), func.max(s.at_s))
            .where(s.at_s >= since_s)
            .group_by(s.uid)
            .order_by(count.desc(), s.uid)
        )
        with self._db.read() as connection:
            return [StrikeCount(*row) for row in connection.execute(query)]

    def strikes_of(self, uid: int) -> list[Strike]:
        """One user's strikes, oldest first."""
        s = schema.strike
        query = select(*(s.c[name] for name in Strike.__slots__)).where(s.c.uid == uid).order_by(s.c.id)
        with self._db.read() as connection:
            return [Strike(**row._mapping) for row in connection.execute(query)]

    def broke(self, promises: Collection[BrokenPromise]) -> None:
        """Record promises that were broken, for the audit trail."""
        if not promises:
            return
        with self._db.write() as connection:
            insert_many(connection, schema.broken_promise, [asdict(item) for item in promises])
            statements.add(connection, {BROKEN_PROMISES: len(promises)})

    def broken_promises(self, since_s: float = 0.0) -> list[BrokenPromise]:
        """The audit trail, oldest first."""
        b = schema.broken_promise
        query = select(*(b.c[name] for name in BrokenPromise.__slots__)).where(b.c.at_s >= since_s).order_by(b.c.id)
        with self._db.read() as connection:
            return [BrokenPromise(**row._mapping) for row in connection.execute(query)]


def to_measure(connection: Connection) -> Iterable[str]:
    """`Conduct.to_measure` inside a transaction that is already open."""
    return connection.scalars(select(schema.remeasure.c.token)).all()


def marks(connection: Connection, tokens: Collection[str]) -> dict[str, int]:
    """Of these tokens those that must be measured anew, each with the time since when."""
    m = schema.remeasure.c
    return {row.token: row.since_s for row in select_in(connection, select(m.token, m.since_s), m.token, tokens)}


def measured(connection: Connection, tokens: Collection[str]) -> None:
    """These tokens were measured on a whole card: they may share again."""
    delete_in(connection, schema.remeasure.c.token, tokens)
    if tokens:
        touch(connection, tokens)


def _measure_anew(connection: Connection, tokens: Mapping[str, int]) -> None:
    rows = [{"token": token, "since_s": at_s} for token, at_s in tokens.items()]
    insert_many(connection, schema.remeasure, rows, replace=True)
    touch(connection, list(tokens))
