"""The connection to a store: SQLite in WAL mode or MariaDB, two kinds of transaction, one clear line for each failure.

While a store is open SQLite keeps two files beside it, ``-wal`` and ``-shm``. Whoever opens it first makes them, with
the mode that the store has at that moment, and a reader who cannot write leaves them behind. If they are then another
user's, or for reading only, the helper cannot write its own store.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import hand_over
from slurm_gpushare.store import StoreDamaged, StoreError, StoreReplaced

WAL, SHM = "-wal", "-shm"


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def remove_journal(path: Path) -> None:
    """Of a store that nobody has open any more."""
    for suffix in (WAL, SHM):
        beside(path, suffix).unlink(missing_ok=True)


def may_open(path: Path) -> bool:
    """Whether this user may open the store without making files that lock its owner out."""
    if os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid() or beside(path, SHM).exists():
        return True
    return not os.access(path, os.R_OK)  # SQLite refuses then before it makes any


def mend_own(path: Path) -> None:
    """Open files of this user's as far as the store is: one that was read-only for a while leaves them read-only."""
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        for file, about in _found(path):
            if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode) and mode & ~about.st_mode:
                file.chmod(mode)


def journal_fix(path: Path) -> str | None:
    """The command, for root, after which the files are the owner's alone again; None if they are.

    It may be run while the store is open.
    """
    try:
        store = path.stat()
        bad = {file: about for file, about in _found(path) if not _fits(about, store)}
    except OSError:
        return None  # not this user's to see
    if strange := [file for file, about in bad.items() if not stat.S_ISREG(about.st_mode)]:
        # SQLite makes no such thing, and root's chown would follow a link to whatever it names.
        return f"rm -d {_words(strange)}"
    like = f"--reference={shlex.quote(str(path))}"
    return f"chown {like} {_words(bad)}; chmod {like} {_words(bad)}" if bad else None


def _words(files: Iterable[Path]) -> str:
    return " ".join(shlex.quote(str(file)) for file in files)


def _found(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for suffix in (WAL, SHM):
        with suppress(FileNotFoundError):
            yield beside(path, suffix), beside(path, suffix).lstat()


def _fits(file: os.stat_result, store: os.stat_result) -> bool:
    """Whether the store's owner may do as much with the file as with the store, and others no more."""
    missing = store.st_mode & 0o600 & ~file.st_mode
    too_open = file.st_mode & 0o077 & ~store.st_mode
    return stat.S_ISREG(file.st_mode) and file.st_uid == store.st_uid and not missing and not too_open


NOT_THE_OWNER = "Run this as SlurmUser, who must own it and its directory."
RESTORE = "Restore the last 'gpushare db backup'."


def explained(error: Exception, where: str, path: Path | None) -> StoreError:
    """The driver's `error` for people. `where` is the store's address, `path` its file if it has one."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause.args[-1] if getattr(cause, "args", None) else cause)
    for sign, what, hint in _KNOWN:
        if sign in text.lower():
            kind = StoreDamaged if sign in _DAMAGE else StoreError
            fix = journal_fix(path) if path and sign in _BY_THE_JOURNAL else None
            return kind(f"{where}: {what}", f"Run as root: {fix}" if fix else hint)
    return StoreError(f"{where}: {text}")


_KNOWN = (
    ("unable to open", "cannot be opened", "Check that the file exists and that this user may read and write it."),
    ("readonly", "cannot be written", NOT_THE_OWNER),
    ("locked", "locked by another process for too long", "See who holds it with: fuser -v FILE."),
    ("not a database", "is not an SQLite database, or is damaged", RESTORE),
    ("malformed", "is damaged", RESTORE),
    ("is full", "the disk is full", "Free some space; nothing was lost: records wait in the spool directory."),
    ("disk i/o", "the disk reports an error", "Look at the kernel's log."),
    ("access denied", "the database refuses this user or password", "Check StoreUrl."),
    ("unknown database", "no such database", "Create it, or correct StoreUrl."),
    ("can't connect", "no database server answers there", "Check StoreUrl and that the server runs."),
    ("no such table", "holds no gpushare store", "Make it with: gpushare db migrate."),
    ("doesn't exist", "holds no gpushare store", "Make it with: gpushare db migrate."),
)
_DAMAGE = frozenset({"not a database", "malformed"})
_BY_THE_JOURNAL = frozenset({"unable to open", "readonly"})
"""What SQLite also says where the store itself could be used, and the files beside it cannot."""


_BUSY_S = 15.0
_TAKE_TURN = "SELECT value FROM counter WHERE name = 'writer' FOR UPDATE"
_URL_HINT = "StoreUrl is sqlite:////path/to/store.sqlite or mysql+pymysql://user:password@host/database."


class Database:
    """One store's engine. `read` sees a consistent snapshot; `write` holds the only write transaction of SQLite."""

    def __init__(self, url: str, *, read_only: bool = False, must_exist: bool = False) -> None:
        self._given, self._url = url, _parse(url)
        self.read_only = read_only
        self._may_create = not (read_only or must_exist)
        self._file: tuple[int, int] | None = None
        self._journal: tuple[int, int] | None = None
        self._damage = ""
        self.engine = self._open()

    @property
    def where(self) -> str:
        """The store's address for messages: no password, and a plain path for a file."""
        return str(self.path) if self.path else self._url.render_as_string(hide_password=True)

    @property
    def path(self) -> Path | None:
        """The file of an SQLite store; None for a network database."""
        return Path(self._url.database or "") if self.is_sqlite else None

    @property
    def is_sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        self._check_file()
        with self._errors(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, *, alone: bool = True) -> Iterator[Connection]:
        """A transaction that is committed at the end, or leaves no trace.

        Writers take turns: SQLite sees to that itself, on MariaDB a row lock does, unless not `alone`.
        """
        if self.read_only:
            raise StoreError(f"{self.where}: opened for reading only")
        self._check_file()
        writer = self.engine.execution_options(gpushare_begin="BEGIN IMMEDIATE")
        with self._errors(), writer.connect() as connection, connection.begin():
            if alone and not self.is_sqlite:
                connection.exec_driver_sql(_TAKE_TURN)
            yield connection
        self._check_file()  # what was committed to a file that nobody will find again must not count as kept
        if self.path is not None:
            self._journal = _identity(beside(self.path, WAL))

    def close(self) -> None:
        self.engine.dispose()

    def reader(self) -> Database:
        """The same store over connections of its own, for reading."""
        return Database(self._given, read_only=True, must_exist=True)

    def condemn(self, damage: str) -> None:
        """Refuse this file from now on: whatever is still written to it is lost once a copy takes its place."""
        self._damage = damage

    def put_back(self) -> bool:
        """Write the store's file anew from what is still open of it, if it was deleted.

        False if another file has its place. The journal of the old one then goes: SQLite would write it into the new.
        """
        if self.path is None:
            return False
        if self.path.exists():
            self.close()
            if self._journal is not None and _identity(beside(self.path, WAL)) == self._journal:
                remove_journal(self.path)
            return False
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            draft.unlink(missing_ok=True)
            self.copy_to(draft)
            remove_journal(self.path)
            os.link(draft, self.path)  # a file that somebody put there meanwhile stays
        except FileExistsError:
            return False
        except OSError as why:
            raise StoreError(f"{self.path}: was deleted, and cannot be written anew: {why.strerror}") from why
        finally:
            draft.unlink(missing_ok=True)
        return True

    def copy_to(self, file: Path) -> None:
        """Copy what is open of an SQLite store, consistently, into a new file of its owner's alone."""
        _make_private(file)
        with self._errors(), closing(self.engine.raw_connection()) as raw, closing(sqlite3.connect(file)) as copy:
            source = raw.driver_connection
            assert isinstance(source, sqlite3.Connection)
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, not three

    def _check_file(self) -> None:
        """SQLite goes on writing to a file that was deleted or moved away, and everything is lost: look first."""
        if self.path is not None and self._file != (found := _identity(self.path)):
            what = "was replaced by another file" if found else "was deleted"
            raise StoreReplaced(f"{self.where}: {what} while in use", "Restore it with: gpushare db restore FILE.")
        if self._damage:
            raise StoreDamaged(f"{self.where}: is damaged: {self._damage}", RESTORE)

    def _open(self) -> Engine:
        if not self.is_sqlite:
            try:
                return create_engine(self._url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
            except ModuleNotFoundError as why:
                raise StoreError(
                    f"{self.where}: the driver is not installed: {why.name}",
                    "Install it with: pip install 'slurm-gpushare[mariadb]'.",
                ) from why
        assert self.path is not None
        if self._may_create:
            _make_private(self.path)
        else:
            _require(self.path)
        path = self.path
        self._file = _identity(path)
        # Who reads and may write leaves no file behind, since SQLite then clears up at the last close.
        mode = "ro" if self.read_only and not os.access(self.path, os.W_OK) else "rw"
        if not may_open(self.path):
            if not self.read_only:
                raise StoreError(f"{self.path}: cannot be written", NOT_THE_OWNER)
            raise StoreError(
                f"{self.path}: others can read it only while the helper has it open",
                "Start 'gpushare backfill', or run this as SlurmUser.",
            )
        engine = create_engine(
            URL.create("sqlite", database=self.path.as_uri(), query={"mode": mode, "uri": "true"}),
            connect_args={"timeout": _BUSY_S},
        )
        if self.read_only:
            event.listen(engine, "connect", _on_reader_connect)
        else:
            event.listen(engine, "do_connect", lambda *_: mend_own(path))
            event.listen(engine, "connect", _on_writer_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        return engine

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:  # the latter from the connect hook, which SQLAlchemy does not wrap
            self._drop_read_only(error)
            raise explained(error, self.where, self.path) from error

    def _drop_read_only(self, error: Exception) -> None:
        """Open the file anew next time: SQLite opens one that is read-only for reading, and never tries again.

        Not if it was deleted, of which SQLite says the same: what is still open is then all that is left of it.
        """
        if self.path is not None and "readonly" in str(error) and _identity(self.path) == self._file:
            self.engine.dispose()


class Subject:
    """One subject of a store, as an attribute of it: every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database


def insert_many(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, replace: bool = False
) -> None:
    """Insert rows that all have the same columns in the same order; past SQLAlchemy's work on each of them.

    With `replace`, a row of the same key goes.
    """
    if not rows:
        return
    mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
    columns, marks = ", ".join(rows[0]), ", ".join([mark] * len(rows[0]))
    statement = f"{'REPLACE' if replace else 'INSERT'} INTO {table.name} ({columns}) VALUES ({marks})"
    connection.exec_driver_sql(statement, [tuple(row.values()) for row in rows])


def _from_file(path: Path) -> str:
    """The URL that a file holds, which nobody else may read since it has a password in it."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise BadInput(f"{path}: others may read it, and it holds a password", f"Run: chmod 600 {path}")
            return file.readline().strip()
    except (OSError, UnicodeDecodeError) as why:
        raise StoreError(f"{path}: cannot be read: {why}", "StoreUrl=file:PATH: a file of SlurmUser's.") from why


def _parse(url: str) -> URL:
    if url.startswith("file:/"):
        url = _from_file(Path(url.removeprefix("file:")))
    try:
        parsed = make_url(url)
        backend, driver = parsed.get_backend_name(), parsed.drivername
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise BadInput("the store's URL is not one that can be used", _URL_HINT) from None
    if driver == "sqlite" and parsed.database and parsed.database.startswith("/"):
        # SQLite keeps its journal beside the file that a link leads to, and a new file must not take the link's place.
        return parsed.set(database=os.path.realpath(parsed.database)) if os.path.islink(parsed.database) else parsed
    if backend in {"mysql", "mariadb"} and driver.endswith("+pymysql") and parsed.database:
        return parsed
    raise BadInput(f"{parsed.render_as_string(hide_password=True)}: not a store's URL", _URL_HINT)


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite store; None for a network database."""
    parsed = _parse(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _require(path: Path) -> None:
    """Raise where there is no store, or where its directory is closed to this user."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as why:
        raise StoreError(f"{path}: there is no store yet", "Make it with: gpushare db migrate.") from why
    except OSError as why:
        raise StoreError(f"{path}: cannot be opened: {why.strerror}", "Run this as SlurmUser.") from why


def _make_private(path: Path) -> None:
    """Create the file for its owner alone; SQLite gives its journal the same mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        hand_over(path)
    except FileExistsError:
        return
    except OSError as why:
        raise StoreError(
            f"{path}: cannot be created: {why.strerror}", "Make its directory, owned by SlurmUser."
        ) from why


def _on_reader_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # transactions are begun below, not guessed by the driver
    connection.execute("PRAGMA query_only=ON")


def _on_writer_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    if connection.execute("PRAGMA page_count").fetchone()[0] == 0:  # a new file; `retention.compact` mends others
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode=WAL")
    # FULL: a committed batch survives a power cut, and only then are its spool files removed.
    connection.execute("PRAGMA synchronous=FULL")


def _on_sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("gpushare_begin", "BEGIN"))
