"""Looking after the store: is it sound, a copy of it while it is in use, and forgetting what is old."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, delete, func, inspect, or_, select

from slurm_gpushare.errors import BadInput, GpushareError
from slurm_gpushare.store import counters, schema
from slurm_gpushare.store.combine import REMEMBERED_RUNS
from slurm_gpushare.store.database import Database, StoreError
from slurm_gpushare.store.migrate import known_migrations, store_version
from slurm_gpushare.store.store import Store

_CHUNK = 500


def problems(database: Database) -> list[str]:
    """What is wrong with the store; empty if it is sound. Raises where it cannot even be opened."""
    version, latest = store_version(database), known_migrations()[-1].version
    if version != latest:
        return [f"schema {version}, this release has {latest}: run 'gpushare db migrate', or update this release"]
    found: list[str] = []
    with database.read() as connection:
        if database.is_sqlite:
            lines = connection.exec_driver_sql("PRAGMA integrity_check(5)").scalars().all()
            found += [f"damaged: {line}" for line in lines if line != "ok"]
        missing = set(schema.METADATA.tables) - set(inspect(connection).get_table_names())
        found += [f"table {name} is missing" for name in sorted(missing)]
        if not missing:
            found += _contradictions(connection)
    if database.path is not None:
        mode = database.path.stat().st_mode & 0o777
        if mode & 0o027:
            found.append(f"mode {mode:o} lets others read it: run 'chmod 640 {database.path}'")
    return found


def _contradictions(connection: Connection) -> list[str]:
    p, w, r, d = schema.profile.c, schema.workload.c, schema.run.c, schema.run_detail.c
    owned = schema.profile.outerjoin(schema.workload, p.token == w.token)
    detailed = schema.run.outerjoin(schema.run_detail, r.id == d.id)
    orphans = connection.scalar(select(func.count()).select_from(owned).where(w.token.is_(None)))
    bare = connection.scalar(select(func.count()).select_from(detailed).where(d.id.is_(None)))
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
    """Copy an SQLite store to `target`, consistently, while others use it."""
    if database.path is None:
        raise BadInput(f"{database.where}: only an SQLite store is copied this way", "Use mariadb-dump.")
    if target.exists():
        raise BadInput(f"{target}: exists already", "Name another file, or remove it.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(database.path)) as source, closing(sqlite3.connect(temporary)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, not three
        temporary.rename(target)
    except sqlite3.Error as why:
        raise StoreError(f"{target}: the copy failed: {why}") from why
    except OSError as why:
        raise GpushareError(f"{target}: cannot be written: {why.strerror}") from why
    finally:
        temporary.unlink(missing_ok=True)


def prune(store: Store, before_s: float) -> Counter[str]:
    """Forget runs, decisions, observations and sharing that ended before `before_s`, and workloads unused since.

    Records from before are refused from then on, because their ids are forgotten too.
    """
    if before_s > time.time():
        raise BadInput("prune: that time has not come yet")
    removed: Counter[str] = Counter()
    with store.database.write() as connection:
        horizon = max(counters.get(connection, counters.PRUNED_BEFORE), int(before_s))
        counters.put(connection, counters.PRUNED_BEFORE, horizon)
    removed["workload"] = _prune_workloads(store.database, before_s)
    removed["run"] = _prune_runs(store.database, before_s)
    for table, column, key in _DATED:
        old = table.c[column] < before_s
        # SQLite may give the highest id again once its row is gone, and learners count on growing ones.
        keep = [table.c.id < select(func.max(table.c.id)).scalar_subquery()] if key == "id" else []
        removed[table.name] = _remove(store.database, table, key, select(table.c[key]).where(old, *keep), old)
    if store.database.is_sqlite:
        with store.database.engine.connect() as raw:
            raw.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return +removed


_DATED = (
    (schema.interim, "at_s", "job_id"),
    (schema.ingested, "end_s", "run_id"),
    (schema.decision, "at_s", "id"),
    (schema.sharing, "end_s", "id"),
    (schema.observation, "at_s", "id"),
)


def _remove(
    database: Database, table: Table, key: str, query: Select[Any], condition: ColumnElement[bool] | None = None
) -> int:
    """Delete the rows whose key `query` finds, in pieces, so that the helper gets its turn in between."""
    count = 0
    with database.read() as connection:
        keys = sorted(set(connection.scalars(query)))
    for at in range(0, len(keys), _CHUNK):
        where = [table.c[key].in_(keys[at : at + _CHUNK]), *([] if condition is None else [condition])]
        with database.write() as connection:
            count += connection.execute(delete(table).where(*where)).rowcount
    return count


def _prune_runs(database: Database, before_s: float) -> int:
    """Old runs go, except those that a profile still rests on."""
    r = schema.run.c
    place = func.row_number().over(partition_by=(r.token, r.gpu_model, r.generation), order_by=r.id.desc())
    ranked = select(r.id, r.end_s, r.token, r.gpu_model, r.state, r.generation, place.label("place")).subquery().c
    p = schema.profile.c
    in_use = (
        select(p.token)
        .where(p.token == ranked.token, p.gpu_model == ranked.gpu_model, p.generation == ranked.generation)
        .exists()
    )
    old = select(ranked.id).where(
        ranked.end_s < before_s, or_(ranked.state != "counted", ranked.place > REMEMBERED_RUNS, ~in_use)
    )
    count = _remove(database, schema.run, "id", old)
    d = schema.run_detail
    _remove(database, d, "id", select(d.c.id).where(d.c.id.not_in(select(r.id))))
    return count


def _prune_workloads(database: Database, before_s: float) -> int:
    """Tokens without a run since then are forgotten, with all that was learned of them."""
    w, p, r = schema.workload.c, schema.profile.c, schema.run.c
    unused = select(w.token).where(
        w.created_s < before_s,
        ~select(r.id).where(r.token == w.token, r.end_s >= before_s).exists(),
        ~select(p.token).where(p.token == w.token, p.updated_s >= before_s).exists(),
    )
    with database.read() as connection:
        tokens = set(connection.scalars(unused))
        names = list(connection.scalars(select(schema.knowledge.c.name)))
    if not tokens:
        return 0
    chosen = sorted(tokens)
    for at in range(0, len(chosen), _CHUNK):
        chunk = chosen[at : at + _CHUNK]
        with database.write() as connection:
            for table, column in _BY_TOKEN:
                connection.execute(delete(table).where(table.c[column].in_(chunk)))
            counters.add(connection, {counters.HOOK_EPOCH: 1})
    documents = [name for name in names if name.rpartition("/")[2] in tokens]
    with database.write() as connection:
        for at in range(0, len(documents), _CHUNK):
            where = schema.knowledge.c.name.in_(documents[at : at + _CHUNK])
            connection.execute(delete(schema.knowledge).where(where))
    return len(tokens)


_BY_TOKEN = (
    (schema.profile, "token"),
    (schema.never_pair, "token_a"),
    (schema.never_pair, "token_b"),
    (schema.workload, "token"),
)
