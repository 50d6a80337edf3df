"""Long lists for SQL's ``IN (...)``, some of them at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete
from sqlalchemy.sql.elements import ColumnElement

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
