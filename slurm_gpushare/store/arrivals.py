"""Sealed records as they arrive: files that nodes and users leave in the spool directory, rows of the inbox.

``incoming/`` may be writable for everybody (mode 1733), so a file in it is opened with suspicion: never through
a link, never more of it than a record can be, never waiting for a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sqlalchemy import select

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database

SUFFIX = ".rec"
_MAX_BYTES = 256 * 1024


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


class Spool:
    """The spool directory: ``incoming/`` and ``rejected/``."""

    def __init__(self, directory: Path) -> None:
        self.incoming = directory / "incoming"
        self.rejected = directory / "rejected"

    def make(self) -> None:
        """Create the directories; users may add to ``incoming/`` but neither list nor remove."""
        for path, mode in ((self.incoming, 0o1733), (self.rejected, 0o700)):
            try:
                path.mkdir(parents=True, exist_ok=False)
                path.chmod(mode)
            except FileExistsError:
                continue
            except OSError as why:
                raise GpushareError(f"{path}: cannot be created: {why.strerror}", "Check SpoolDir.") from why

    def take(self, limit: int) -> list[Arrival | Refusal]:
        """Up to `limit` files; they stay where they are until `done` or `reject`."""
        found = (_read(path) for path in islice(self._names(), limit))
        return [item for item in found if item is not None]

    def waiting(self) -> int:
        """How many files have not been taken in."""
        return sum(1 for _ in self._names())

    def done(self, arrival: Arrival) -> None:
        """Remove a file whose record is in the store, unless a newer one has taken its place."""
        path = arrival.path
        assert path is not None
        try:
            if _identity(path.lstat()) == arrival.identity:
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as why:
            raise _stuck(path, why) from why

    def reject(self, path: Path, reason: str) -> None:
        """Move a file to ``rejected/``, its reason beside it."""
        target = self.rejected / path.name
        try:
            self.rejected.mkdir(mode=0o700, exist_ok=True)
            target.with_name(target.name + ".reason").write_text(reason + "\n", encoding="utf-8")
            if path.is_symlink():
                path.unlink()  # whoever looks into rejected/ must not follow it
            else:
                path.rename(target)
        except FileNotFoundError:
            return
        except OSError as why:
            raise _stuck(path, why) from why

    def _names(self) -> Iterator[Path]:
        try:
            with os.scandir(self.incoming) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                        yield Path(entry.path)
        except FileNotFoundError:
            return
        except OSError as why:
            raise GpushareError(f"{self.incoming}: cannot be read: {why.strerror}", "Check SpoolDir.") from why


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _stuck(path: Path, why: OSError) -> GpushareError:
    return GpushareError(f"{path}: cannot be removed: {why.strerror}", "SpoolDir must belong to who runs ingest.")


def _read(path: Path) -> Arrival | Refusal | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # another ingest was faster
    except OSError as why:
        if why.errno in {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}:
            return None  # a hiccup of this machine or the file server: try again later
        return Refusal("is a link" if why.errno == errno.ELOOP else "cannot be opened", path)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return Refusal("is not a regular file", path)
        if status.st_size > _MAX_BYTES:
            return Refusal(f"is longer than {_MAX_BYTES} bytes", path)
        return Arrival(os.read(handle, _MAX_BYTES), path, identity=_identity(status))
    except OSError:
        return None
    finally:
        os.close(handle)


class Inbox:
    """``store.inbox``: for nodes that reach the database but share no file system with the controller.

    A node's database user needs nothing but INSERT on this one table: who wrote a record is proven by its
    credential, not by the database.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def deliver(self, credential: bytes) -> None:
        if len(credential) > _MAX_BYTES or not credential.isascii():
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
