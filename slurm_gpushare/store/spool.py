"""The spool directory, where nodes and users leave sealed records.

Nodes leave theirs in ``nodes/``, which is SlurmUser's. ``incoming/`` may be writable for everybody (mode 1733), so
nothing in it is trusted: not a name, not a kind of file, not how many there are. A file is never opened through a link,
never read further than a record can be long, never waited for. Every look at the directory is bounded, nodes' files
come first, and whatever cannot be used or moved is passed over: one entry of a user's must never stop the helper.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from select import select as select_ready

from sqlalchemy import select

from slurm_gpushare.node.delivery import INCOMING, NODES, REJECTED, SUFFIX
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import make_open_dir, overwrite_line
from slurm_gpushare.protocol.settings_in_force import settings_in_force
from slurm_gpushare.protocol.stop_orders import StopOrder
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, Subject, insert_many

ENTRIES_A_LOOK = 20_000
"""The next look goes on where this one ended."""
FILES_A_USER = 1000
BYTES_A_USER = 16 * 1024 * 1024
"""What one user may have waiting; more is removed unread."""
ORDERS_EVERY_S = 3.0
"""How often a node without a spool asks the database who is to stand still."""
STRAY_S = 3600.0
"""A file that is no record, such as a draft of a writer that died, is removed after this time."""
KEPT_REJECTED = 1000
KEPT_REJECTED_S = 7 * 86_400.0
_STUCK_REMEMBERED = 200_000
"""Names of what can be neither read nor removed: to try each again at every look would slow all ticks down."""
# Root gives its records to who owns the spool; an NFS server with root_squash gives them to nobody.
_SQUASHED_UID = 65534


class Spool:
    """``nodes/``, ``incoming/`` and ``rejected/``.

    `counts` tells what was removed or had to be left, since they were last read.
    """

    def __init__(self, directory: Path, node_uids: Collection[int] = (0,)) -> None:
        self.nodes = directory / NODES
        self.incoming = directory / INCOMING
        self.rejected = directory / REJECTED
        self.counts: Counter[str] = Counter()
        self._node_uids = frozenset({*node_uids, os.geteuid(), _SQUASHED_UID})
        self._entries: Iterator[os.DirEntry[str]] = iter(())
        self._stuck: set[str] = set()

    def look(self) -> list[Path]:
        """Files that may be records: nodes' first, then users' in turn. What nobody may leave there is removed."""
        nodes: list[Path] = []
        users: dict[int, list[Path]] = {}
        files: Counter[int] = Counter()
        size: Counter[int] = Counter()
        for entry in chain(islice(self._scan(self.nodes), ENTRIES_A_LOOK), self._next_entries()):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # another ingest was faster
            path, uid = Path(entry.path), status.st_uid
            if stat.S_ISDIR(status.st_mode):
                # Nobody of ours makes one. A user's that is not empty can only be removed by the user or by root.
                self._remove(path, "stray", Path.rmdir)
                continue
            files[uid] += 1
            size[uid] += status.st_size
            vouched = uid in self._node_uids
            if not vouched and (files[uid] > FILES_A_USER or size[uid] > BYTES_A_USER):
                self._remove(path, "excess")
            elif not _is_record(entry.name):
                if time.time() - status.st_mtime > STRAY_S:
                    self._remove(path, "stray")
            else:
                (nodes if vouched else users.setdefault(uid, [])).append(path)
        in_turn = zip_longest(*users.values())
        return nodes + [path for row in in_turn for path in row if path is not None]

    @property
    def all_seen(self) -> bool:
        """Whether the last look came to the end of the directory."""
        first = next(self._entries, None)
        if first is None:
            return True
        rest = self._entries
        self._entries = (entry for part in ([first], rest) for entry in part)
        return False

    def done(self, arrival: Arrival) -> None:
        """Remove a file whose record is in the store, unless a newer one has taken its place."""
        path = arrival.path
        assert path is not None
        try:
            taken = _identity(path.lstat()) == arrival.identity
        except OSError:
            return
        if taken:
            self._remove(path)

    def reject(self, path: Path, reason: str) -> None:
        """Move a file to ``rejected/`` under a name of our own, its reason beside it; what is no plain file goes."""
        try:
            status = path.lstat()
            make_open_dir(self.rejected, 0o700)
            target = self.rejected / f"u{status.st_uid}-{secrets.token_hex(6)}{SUFFIX}"
            target.with_name(target.name + ".reason").write_text(reason + "\n", encoding="utf-8")
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
                path.rename(target)
            else:
                path.unlink()
        except FileNotFoundError:
            return
        except OSError:
            self._remove(path, "unkept")

    def prune_rejected(self) -> None:
        """Forget what was rejected long ago, and the oldest of what is too much."""
        try:
            with os.scandir(self.rejected) as entries:
                found = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
        except OSError:
            return
        old_s = time.time() - KEPT_REJECTED_S
        excess = len(found) - 2 * KEPT_REJECTED  # each has its reason beside it
        for number, (at_s, path) in enumerate(found):
            if number >= excess and at_s >= old_s:
                break
            try:
                os.unlink(path)
            except OSError:
                continue  # gone, or no file of ours

    def _next_entries(self) -> Iterator[os.DirEntry[str]]:
        """The next entries of the directory; after its end, from its beginning."""
        found = list(islice(self._entries, ENTRIES_A_LOOK))
        if not found:
            self._stuck = self._stuck if len(self._stuck) < _STUCK_REMEMBERED else set()
            self._entries = self._scan(self.incoming)
            found = list(islice(self._entries, ENTRIES_A_LOOK))
        return (entry for entry in found if entry.name not in self._stuck)

    def _scan(self, directory: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(directory) as entries:
                yield from entries
        except FileNotFoundError:
            if directory is self.nodes and self.incoming.is_dir():
                make_open_dir(directory, 0o700)
        except OSError as why:
            raise GpushareError(f"{directory}: cannot be read: {why.strerror}", "Check SpoolDir.") from why

    def _remove(self, path: Path, why: str = "", how: Callable[[Path], None] = Path.unlink) -> None:
        try:
            how(path)
        except FileNotFoundError:
            return
        except OSError:
            self.counts["stuck"] += 1
            self._stuck.add(path.name)
        else:
            self.counts.update([why] if why else [])


def read_record(path: Path) -> Arrival | Refusal | None:
    """The file's content, why it is none, or None if it should be tried again later."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # another ingest was faster
    except OSError as why:
        if why.errno in {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}:
            return None  # a hiccup of this machine or the file server
        return Refusal("is a link" if why.errno == errno.ELOOP else "cannot be opened", path)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return Refusal("is not a regular file", path)
        if status.st_size > MAX_BYTES:
            return Refusal(f"is longer than {MAX_BYTES} bytes", path)
        return Arrival(os.read(handle, MAX_BYTES), path, identity=_identity(status))
    except OSError:
        return None
    finally:
        os.close(handle)


def _is_record(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


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


class Inbox(Subject):
    """``store.inbox``: for nodes that reach the database but share no file system with the controller.

    A node's database user needs nothing but INSERT on this one table: who wrote a record is proven by its
    credential, not by the database.
    """

    def deliver(self, credential: bytes) -> None:
        if len(credential) > MAX_BYTES or not credential.isascii():
            raise GpushareError("record: not a munge credential")
        row = {"received_s": int(time.time()), "credential": credential.decode("ascii")}
        with self._db.write(alone=False) as connection:
            connection.execute(schema.inbox.insert().values(row))

    def take(self, limit: int, after: int = 0) -> list[Arrival]:
        """The oldest rows after that one; they stay until the transaction that takes their records in removes them."""
        i = schema.inbox.c
        with self._db.read() as connection:
            rows = connection.execute(select(i.id, i.credential).where(i.id > after).order_by(i.id).limit(limit))
            return [Arrival(row.credential.encode("ascii", errors="replace"), inbox_id=row.id) for row in rows]


class StopOrders(Subject):
    """``store.stop_orders``: who is to stand still, for nodes that share no file system with the controller.

    A node's database user needs SELECT on this table. What is not renewed lapses there, as with the file.
    """

    def put(self, lines: Mapping[str, str]) -> None:
        """Tell these nodes, in place of what they were told before."""
        with self._db.write(alone=False) as connection:
            rows = [{"node": node, "line": line} for node, line in lines.items()]
            insert_many(connection, schema.stop_order, rows, replace=True)

    def of(self, node: str) -> str | None:
        o = schema.stop_order.c
        with self._db.read() as connection:
            return connection.scalar(select(o.line).where(o.node == node))


def bring_orders(orders: StopOrders, node: str, path: Path) -> None:
    """Keep a file on the node, root's alone, as the database has the node's order, until stdin is closed."""
    while not select_ready([sys.stdin], [], [], ORDERS_EVERY_S)[0]:
        overwrite_line(path, orders.of(node) or str(StopOrder(0)))


def main(arguments: Sequence[str] = ()) -> int:
    """Put the sealed record on stdin into the store's inbox; with ``NODE FILE``, bring the node's stop orders there.

    Samplers run it where nodes share no file system with the controller (RecordsTo=store): a process of its own, so
    that the database's drivers are not in every sampler's memory. Exit code 0 once the record is in the database.
    """
    try:
        database = Database(settings_in_force().store_url, read_only=bool(arguments), must_exist=True)
        try:
            if arguments:
                os.umask(0o077)
                bring_orders(StopOrders(database), arguments[0], Path(arguments[1]))
            else:
                Inbox(database).deliver(sys.stdin.buffer.read())
        finally:
            database.close()
    except (GpushareError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
