"""Looking after the store: is it sound, a copy of it while it is in use, and such a copy in its place."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, func, inspect, select

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import hand_over, replacing
from slurm_gpushare.store import StoreDamaged, StoreError, schema
from slurm_gpushare.store.database import RESTORE, Database, journal_fix, sqlite_path
from slurm_gpushare.store.schema import known_migrations, migrate, store_version
from slurm_gpushare.store.store import Store


def problems(database: Database) -> list[str]:
    """What is wrong with the store; empty if it is sound. Raises where there is none, or it is not ours to read."""
    try:
        return _problems(database)
    except StoreDamaged as error:
        return [str(error).removeprefix(f"{database.where}: ")]


def _problems(database: Database) -> list[str]:
    version, latest = store_version(database), known_migrations()[-1].version
    if version != latest:
        return [f"schema {version}, this release has {latest}: run 'gpushare db migrate', or update this release"]
    found: list[str] = []
    with database.read() as connection:
        if database.is_sqlite:
            lines = connection.exec_driver_sql("PRAGMA integrity_check(5)").scalars().all()
            if lines != ["ok"]:
                return [f"damaged: {line}" for line in lines]
        missing = set(schema.METADATA.tables) - set(inspect(connection).get_table_names())
        found += [f"table {name} is missing" for name in sorted(missing)]
        if not missing:
            found += _contradictions(connection)
    if database.path is not None and (fix := mode_fix(database.path)):
        found.append(f"open to others: run '{fix}'")
    if database.path is not None and (fix := journal_fix(database.path)):
        found.append(f"{JOURNAL_TROUBLE}: run as root '{fix}'")
    return found


def damage(database: Database) -> str:
    """What SQLite finds wrong with the file of a store that is in use, in one line; nothing where it is sound.

    Every page is read, but indexes are not compared with their tables, which would take three times as long.
    """
    with closing(database.reader()) as own:
        try:
            with own.read() as connection:
                line = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
        except StoreDamaged as error:
            return error.what.removeprefix(f"{own.where}: ")
    return "" if line == "ok" else " ".join(line.split())


JOURNAL_TROUBLE = "files that SQLite keeps beside it are another user's, too open, or not for its owner to write"


def mode_fix(path: Path) -> str | None:
    """The command that closes the store's file to others; None if it is closed. A site may let its group read it."""
    return f"chmod g-w,o= {path}" if path.stat().st_mode & 0o027 else None


def _contradictions(connection: Connection) -> list[str]:
    p, w, r, d = schema.profile.c, schema.workload.c, schema.run.c, schema.run_detail.c
    owned = schema.profile.outerjoin(schema.workload, p.token == w.token)
    detailed = schema.run.outerjoin(schema.run_detail, r.id == d.id)
    orphans = connection.scalar(select(func.count()).select_from(owned).where(w.token.is_(None)))
    bare = connection.scalar(
        select(func.count()).select_from(detailed).where(d.id.is_(None), r.state != schema.DROPPED)
    )
    return [
        *([f"{orphans} profiles of tokens that nobody owns"] if orphans else []),
        *([f"{bare} runs without their numbers"] if bare else []),
    ]


def sizes(store: Store) -> dict[str, int]:
    """Rows of each table."""
    with store.database.read() as connection:
        tables = sorted(schema.METADATA.tables.items())
        return {name: connection.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables}


def backup(database: Database, target: Path) -> None:
    """Copy an SQLite store to `target`, consistently, while others use it. A damaged one is no copy to rely on."""
    if database.path is None:
        raise BadInput(f"{database.where}: only an SQLite store is copied this way", "Use mariadb-dump.")
    with closing(database.reader()) as own, own.read() as connection:  # its own faults are said of the store itself
        connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    try:
        if target.exists():
            raise BadInput(f"{target}: exists already", "Name another file, or remove it.")
        with (
            replacing(target, 0o600, sync=True) as draft,
            closing(sqlite3.connect(database.path)) as source,
            closing(sqlite3.connect(draft)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, not three
            if (found := _unsound(copy, "quick_check")) is not None:
                raise StoreDamaged(f"{database.where}: is damaged: {found}", f"No copy was made. {RESTORE}")
    except sqlite3.Error as why:
        raise StoreError(
            f"{target}: the copy failed: {why}", "Is there room for it? 'gpushare db check' says if the store is sound."
        ) from why
    except OSError as why:
        hint = "Name a file in a directory that this user may write to."
        raise GpushareError(f"{target}: cannot be written: {why.strerror}", hint) from why


def _unsound(connection: sqlite3.Connection, check: str) -> str | None:
    """The first thing that SQLite finds wrong, in one line; None where nothing is."""
    (text,) = connection.execute(f"PRAGMA {check}(1)").fetchone()
    lines = [line for line in str(text).splitlines() if not line.startswith("***")]
    return None if lines == ["ok"] else " ".join(lines)


def restore(url: str, source: Path, now_s: float | None = None) -> Path | None:
    """Make the copy `source` the store again, brought to this release's schema. Nobody else may use it meanwhile.

    What was there is kept beside it under another name, which is returned; None if there was nothing.
    """
    path = store_path(url)
    try:
        with replacing(path, 0o600, sync=True) as draft:
            _copy_sound(source, draft)
            hand_over(draft)
            with closing(Database(f"sqlite:///{draft}", must_exist=True)) as database:
                migrate(database, copy_first=False)
            with closing(sqlite3.connect(draft)) as new:
                new.execute("PRAGMA journal_mode=DELETE")
            aside = _set_aside(path, int(time.time() if now_s is None else now_s))
    except OSError as why:
        hint = "Run this as SlurmUser, who must own its directory, or as root."
        raise GpushareError(f"{path}: cannot be replaced: {why.strerror}", hint) from why
    return aside


def _copy_sound(source: Path, draft: Path) -> None:
    """Copy a store that is sound; BadInput for anything else."""
    hint = "Name another file that 'gpushare db backup' wrote."
    try:
        if source.exists() and not source.is_file():  # to open a pipe would wait for a writer
            raise BadInput(f"{source}: not a file", hint)
        reading = f"{source.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(reading, uri=True)) as old, closing(sqlite3.connect(draft)) as new:
            old.backup(new)
            found = _unsound(new, "integrity_check")
            new.execute("SELECT max(version) FROM schema_version").fetchone()
            if new.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone()[0]:
                found = "it has triggers or views, which no store of ours has"
    except sqlite3.Error as why:
        raise BadInput(f"{source}: not a sound copy of a store: {why}", hint) from why
    if found is not None:
        raise BadInput(f"{source}: not a sound copy of a store: {found}", hint)


def store_path(url: str) -> Path:
    """The file of an SQLite store; BadInput for a network database."""
    path = sqlite_path(url)
    if path is None:
        raise BadInput("only an SQLite store is restored this way", "Restore a database server's with its own tools.")
    return path


def _set_aside(path: Path, now_s: int) -> Path | None:
    kept = path.with_name(f"{path.name}.before-{now_s}")
    for suffix in ("-shm", "-wal", ""):  # the journal belongs to the file that it is beside
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(kept.with_name(kept.name + suffix))
    return kept if kept.exists() else None
