"""Sealed records as they arrive: files of the spool directory (`incoming`), rows of the inbox."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database

MAX_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    """One sealed record: a file of the spool, or a row of the inbox."""

    credential: bytes
    path: Path | None = None
    inbox_id: int | None = None
    identity: tuple[int, int] = (0, 0)
    """Inode and time of the file that was read: a sampler may put its next record in the same place."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file or row that is no record, and why. The reason never quotes it."""

    reason: str
    path: Path | None = None
    inbox_id: int | None = None


class Inbox:
    """``store.inbox``: for nodes that reach the database but share no file system with the controller.

    A node's database user needs nothing but INSERT on this one table: who wrote a record is proven by its
    credential, not by the database.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def deliver(self, credential: bytes) -> None:
        if len(credential) > MAX_BYTES or not credential.isascii():
            raise GpushareError("record: not a munge credential")
        row = {"received_s": int(time.time()), "credential": credential.decode("ascii")}
        with self._db.write(alone=False) as connection:
            connection.execute(schema.inbox.insert().values(row))

    def take(self, limit: int) -> list[Arrival]:
        """The oldest rows; they stay until the transaction that takes their records in removes them."""
        i = schema.inbox.c
        with self._db.read() as connection:
            rows = connection.execute(select(i.id, i.credential).order_by(i.id).limit(limit))
            return [Arrival(row.credential.encode("ascii", errors="replace"), inbox_id=row.id) for row in rows]
