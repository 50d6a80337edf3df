"""Looking after the store: is it sound, a copy of it while it is in use, and such a copy in its place."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, delete, exists, func, inspect, or_, select, update

from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import hand_over, replacing
from slurm_gpushare.protocol.text import duration_text
from slurm_gpushare.store import StoreDamaged, StoreError, schema, statements
from slurm_gpushare.store.database import RESTORE, Database, explained, journal_fix, sqlite_path
from slurm_gpushare.store.refine import REMEMBERED_RUNS, forget_runs
from slurm_gpushare.store.schema import known_migrations, migrate, store_version
from slurm_gpushare.store.statements import chunks, delete_in, select_in
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.stored_jobs import within


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


AHEAD_S = 86_400.0
"""The present is at most so long after the last run that a node has reported: a clock that jumped ahead forgets
nothing, and where nothing is reported nothing grows."""
APART_S = 3600.0
"""Clocks that differ by more are not the same time."""
_INCREMENTAL = 2
_FREED_AT_ONCE = 2000
"""Pages, of a few kB each."""


def newest_run_s(database: Database) -> float | None:
    """When the last run ended that a node has vouched for; None if there is none."""
    r = schema.run.c
    query = select(r.end_s).where(r.by_node == 1, r.state != schema.DROPPED).order_by(r.end_s.desc()).limit(1)
    with database.read() as connection:
        return connection.scalar(query)


def present_s(database: Database, now_s: float) -> float:
    """The time by which things are old: this machine's, unless that is long after all that nodes have said."""
    newest_s = newest_run_s(database)
    return now_s if newest_s is None else min(now_s, newest_s + AHEAD_S)


def clock_doubt(database: Database, now_s: float, slurmctld_s: float | None = None) -> str:
    """Who says another time than this machine's clock; empty where nobody does."""
    says = {"slurmctld": slurmctld_s}
    if not database.is_sqlite:
        with database.read() as connection:
            says["the database"] = float(connection.exec_driver_sql("SELECT UNIX_TIMESTAMP()").scalar_one())
    for who, at_s in says.items():
        if at_s is not None and abs(at_s - now_s) > APART_S:
            return _apart(who, at_s, now_s)
    newest_s = newest_run_s(database)
    return _apart("the newest record of a node", newest_s, now_s) if newest_s and newest_s > now_s + APART_S else ""


def _apart(who: str, at_s: float, now_s: float) -> str:
    where = "behind" if at_s > now_s else "ahead of"
    return f"this machine's clock is {duration_text(abs(at_s - now_s))} {where} {who}"


def prune(store: Store, before_s: float, *, dry_run: bool = False) -> Counter[str]:
    """Forget runs, jobs, decisions, observations and sharing that ended before `before_s`, and tokens unused since.

    Records from before are refused from then on, because their ids are forgotten too. A dry run only counts.
    """
    removed: Counter[str] = Counter()
    for table, count in _counted(store, before_s) if dry_run else pieces(store, before_s):
        removed[table] += count
    return +removed


def pieces(store: Store, before_s: float) -> Iterator[tuple[str, int]]:
    """`prune` in short transactions, so that others get their turn between two: table and rows removed.

    Room that becomes free is given back, where the store was made so or compacted (`compact`).
    """
    if before_s > time.time():
        raise BadInput("prune: that time has not come yet")
    database = store.database
    with database.write() as connection:
        horizon = max(statements.get(connection, statements.PRUNED_BEFORE), int(before_s))
        statements.put(connection, statements.PRUNED_BEFORE, horizon)
    with database.read() as connection:
        tokens: list[str] = sorted(connection.scalars(_unused(before_s)))
    for some in chunks(tokens):
        with database.write() as connection:
            _forget_tokens(connection, some)
        yield "workload", len(some)
    for table, date, old in _old(before_s):
        from_s, more = -1.0, True
        while more:
            query = select(table.c.id, date.label("at_s")).where(date >= from_s, *old).order_by(date)
            with database.write() as connection:
                rows = connection.execute(query.limit(statements.AT_ONCE)).all()
                ids = [row.id for row in rows]
                if table is schema.run:
                    delete_in(connection, schema.run_detail.c.id, ids)
                delete_in(connection, table.c.id, ids)
            yield table.name, len(rows)
            if more := len(rows) == statements.AT_ONCE:
                from_s = rows[-1].at_s
    while database.is_sqlite and _free_some(database):
        yield "page", 0


def _counted(store: Store, before_s: float) -> Iterator[tuple[str, int]]:
    queries = {"workload": _unused(before_s).subquery()}
    queries |= {table.name: select(table.c.id).where(*old).subquery() for table, _, old in _old(before_s)}
    with store.database.read() as connection:
        for name, query in queries.items():
            yield name, connection.scalar(select(func.count()).select_from(query)) or 0


def _old(before_s: float) -> Iterator[tuple[Table, ColumnElement[Any], list[ColumnElement[bool]]]]:
    """Tables, the column of their date, and which of their rows are to go."""
    yield schema.run, schema.run.c.end_s, _forgettable(before_s)
    for table, date in _DATED.items():
        # SQLite may give the highest id again once its row is gone, and learners count on growing ones.
        last = select(func.max(table.c.id)).scalar_subquery()
        yield table, date, [date < before_s, table.c.id < last]


_DATED = {column.table: column for column in (
    schema.decision.c.at_s, schema.sharing.c.end_s, schema.observation.c.at_s, schema.job.c.end_s,
)}  # fmt: skip


def _forgettable(before_s: float) -> list[ColumnElement[bool]]:
    """Old runs, except the latest that a profile still rests on."""
    r, p, later = schema.run.c, schema.profile.c, schema.run.alias().c
    in_use = exists().where(p.token == r.token, p.gpu_model == r.gpu_model, p.generation == r.generation)
    same = (later.token == r.token, later.gpu_model == r.gpu_model, later.generation == r.generation,
            later.by_node == r.by_node, later.state == r.state, later.id > r.id)  # fmt: skip
    ninth = select(later.id).where(*same).order_by(later.id).limit(1).offset(REMEMBERED_RUNS - 1).scalar_subquery()
    return [r.end_s < before_s, or_(r.state != "counted", ~in_use, ninth.is_not(None))]


def _unused(before_s: float) -> Select[tuple[str]]:
    """Tokens without a run since then."""
    w, p, r = schema.workload.c, schema.profile.c, schema.run.c
    return select(w.token).where(
        w.created_s < before_s,
        ~exists().where(r.token == w.token, r.end_s >= before_s),
        ~exists().where(p.token == w.token, p.updated_s >= before_s),
    )


def _forget_tokens(connection: Connection, tokens: Collection[str]) -> None:
    """With all that was learned of them; the hook's file is written anew."""
    for column in (schema.profile.c.token, schema.ban.c.token_a, schema.ban.c.token_b, schema.workload.c.token):
        delete_in(connection, column, tokens)
    statements.add(connection, {statements.HOOK_EPOCH: 1})


def _free_some(database: Database) -> bool:
    """Give free pages back to the file system; whether there may be more. The file gets shorter at a checkpoint."""
    with closing(database.engine.raw_connection()) as raw:
        file = raw.driver_connection
        assert isinstance(file, sqlite3.Connection)
        mode, free = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("auto_vacuum", "freelist_count"))
        if mode == _INCREMENTAL and free:
            file.executescript(f"PRAGMA incremental_vacuum({_FREED_AT_ONCE})")  # `execute` would free a single page
            if free > _FREED_AT_ONCE:
                return True
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return False


def compact(database: Database) -> None:
    """Write the store anew without the room that is free in it; it gives room back by itself from then on.

    Nobody else may use an SQLite store meanwhile, and the disk needs room for a copy.
    """
    if not database.is_sqlite:
        with database.write(alone=False) as connection:
            for name in sorted(schema.METADATA.tables):
                connection.exec_driver_sql(f"OPTIMIZE TABLE {name}").all()
        return
    with closing(database.engine.raw_connection()) as raw:
        file = raw.driver_connection
        assert isinstance(file, sqlite3.Connection)
        try:
            file.executescript("PRAGMA auto_vacuum=INCREMENTAL; VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise explained(error, database.where, database.path) from error


def forget_user(store: Store, uid: int, *, dry_run: bool = False) -> Counter[str]:
    """Forget a user: tokens, what was measured and decided, and jobs; rows removed by table.

    What others' jobs shared with theirs stays, without the token of the one who has left.
    """
    r, s, o, d = schema.run.c, schema.sharing, schema.observation.c, schema.decision.c
    tokens = sorted(store.workloads.of_owner(uid))
    with store.database.read() as connection:
        some_runs = select(r.id, r.job_id, r.start_s, r.end_s)
        runs = [*connection.execute(some_runs.where(r.author_uid == uid)),
                *select_in(connection, some_runs, r.token, tokens)]  # fmt: skip
        jobs = connection.execute(select(schema.job).where(schema.job.c.uid == uid)).all()
        periods: dict[int, list[tuple[float, float]]] = {}
        for run in runs:
            periods.setdefault(run.job_id, []).append((run.start_s, run.end_s))
        for job in jobs:
            periods.setdefault(job.job_id, []).append((job.first_submit_s, job.end_s or float("inf")))
        decided = select_in(connection, select(d.id, d.job_id, d.at_s), d.job_id, periods)
        doomed = {
            d.id: [row.id for row in decided if within(periods, row.job_id, row.at_s)],
            schema.job.c.id: [job.id for job in jobs],
            o.victim: tokens,
            o.neighbour: tokens,
        }
    ours = {"workload": len(tokens), "run": len({run.id for run in runs}),
            "decision": len(doomed[d.id]), "job": len(jobs)}  # fmt: skip
    if not dry_run:
        with store.database.write() as connection:
            forget_runs(connection, {run.id for run in runs})
            for column, values in doomed.items():
                delete_in(connection, column, values)
            for some in chunks(tokens):
                both = (s.c.resident_token.in_(some), s.c.guest_token.in_(some))
                connection.execute(delete(s).where(*both))
                for column in (s.c.resident_token, s.c.guest_token):
                    connection.execute(update(s).where(column.in_(some)).values({column.name: ""}))
            _forget_tokens(connection, tokens)
    return +Counter(ours)
