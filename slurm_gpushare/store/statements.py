"""What several subjects of the store need: long lists in ``IN (...)``, and small numbers with a name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, select, update
from sqlalchemy.sql.elements import ColumnElement

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Subject

AT_ONCE = 500
"""Values in one statement: SQLite before 3.32 takes 999 parameters, and a statement may have others beside them."""

_T = TypeVar("_T")


def chunks(values: Sequence[_T], at_once: int | None = None) -> Iterator[Sequence[_T]]:
    at_once = at_once or AT_ONCE
    return (values[first : first + at_once] for first in range(0, len(values), at_once))


def select_in(
    connection: Connection, query: Select[Any], column: ColumnElement[Any], values: Collection[Any]
) -> Iterator[Row[Any]]:
    """The rows of `query` whose `column` has one of these values."""
    for some in chunks(sorted(values)):
        yield from connection.execute(query.where(column.in_(some))).all()


def delete_in(connection: Connection, column: Any, values: Collection[Any]) -> None:
    """Remove the rows whose `column` has one of these values."""
    for some in chunks(sorted(values)):
        connection.execute(delete(column.table).where(column.in_(some)))


def new_row(item: Any) -> dict[str, Any]:
    """The columns of a dataclass, but its id, which the store gives."""
    return {name: value for name, value in asdict(item).items() if name != "id"}


CHANGE = "change_seq"
HOOK_EPOCH = "hook_epoch"
"""Raised when workloads were removed: the hook's file must then be compared as a whole."""
PRUNED_BEFORE = "pruned_before_s"
"""Records that ended earlier are refused: their ids may have been forgotten."""


class Counters(Subject):
    """``store.counters``: for metrics and checks."""

    def all(self) -> dict[str, int]:
        with self._db.read() as connection:
            return {row.name: row.value for row in connection.execute(select(schema.counter))}

    def put(self, name: str, value: int) -> None:
        with self._db.write() as connection:
            put(connection, name, value)

    def add(self, amounts: Mapping[str, int]) -> None:
        with self._db.write() as connection:
            add(connection, amounts)


def add(connection: Connection, amounts: Mapping[str, int]) -> None:
    """Raise counters; one that does not exist begins at 0."""
    c = schema.counter
    for name, amount in sorted(amounts.items()):
        changed = connection.execute(update(c).where(c.c.name == name).values(value=c.c.value + amount))
        if not changed.rowcount:
            connection.execute(c.insert().values(name=name, value=amount))


def get(connection: Connection, name: str) -> int:
    return connection.scalar(select(schema.counter.c.value).where(schema.counter.c.name == name)) or 0


def put(connection: Connection, name: str, value: int) -> None:
    add(connection, {name: value - get(connection, name)})


def next_change(connection: Connection) -> int:
    """The number of a change that the hook's file must follow."""
    add(connection, {CHANGE: 1})
    return get(connection, CHANGE)
