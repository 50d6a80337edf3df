"""The store's tables, as SQLAlchemy sees them, and the numbered migrations that make them.

``sql/0001_store.sql``, ``sql/0002_...``: each is applied once, in order, and recorded; a test compares the two.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    func,
    inspect,
    select,
)
from sqlalchemy.sql.type_api import TypeEngine

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.store import StoreError
from slurm_gpushare.store.database import Database

METADATA = MetaData()


def _table(table: str, key: str, /, **columns: type[TypeEngine[Any]] | TypeEngine[Any]) -> Table:
    keys = key.split()
    return Table(table, METADATA, *(Column(name, kind, primary_key=name in keys) for name, kind in columns.items()))


_TOKEN = String(40)
_NODE = String(64)
_MODEL = String(80)

workload = _table(
    "workload", "token",
    token=_TOKEN, owner_uid=BigInteger, created_s=BigInteger, mem_floor_mib=BigInteger, change_seq=BigInteger,
    measure_since_s=BigInteger, cpus=Integer, cpus_at_s=BigInteger,
)  # fmt: skip
profile = _table(
    "profile", "token gpu_model",
    token=_TOKEN, gpu_model=_MODEL, generation=Integer, runs=Integer, mem_used_mib=BigInteger,
    mem_total_mib=BigInteger, duration_s=Double, features=Text, scatter=Text, cluster=Integer,
    needs_cluster=SmallInteger, updated_s=BigInteger,
)  # fmt: skip
run = _table(
    "run", "id",
    id=Integer, state=String(12), by_node=SmallInteger, author_uid=BigInteger, run_id=String(32), seq=BigInteger,
    token=_TOKEN, job_id=BigInteger, node=_NODE, gpu_index=Integer, gpu_model=_MODEL, start_s=Double, end_s=Double,
    alone_s=Double, shared_s=Double, generation=Integer, settled_seq=BigInteger, final=SmallInteger,
)  # fmt: skip
RUNNING, WAITING, DROPPED = "running", "waiting", "dropped"
"""States of a run: its sampler still writes; its token is asked for; its job took no part (only its id is kept)."""
run_detail = _table("run_detail", "id", id=Integer, features=Text, body=Text)
inbox = _table("inbox", "id", id=Integer, received_s=BigInteger, credential=Text)
stop_order = _table("stop_order", "node", node=_NODE, line=Text)
knowledge = _table("knowledge", "name", name=String(190), updated_s=BigInteger, body=Text)
observation = _table(
    "observation", "id",
    id=Integer, source=String(120), gpu_model=_MODEL, victim=_TOKEN, neighbour=_TOKEN, rate=Double, weight=Double,
    at_s=BigInteger,
)  # fmt: skip
decision = _table(
    "decision", "id",
    id=Integer, job_id=BigInteger, at_s=BigInteger, kind=String(16), node=_NODE, gpu_index=Integer,
    partner_job=BigInteger, rate=Double, reasons=Text,
)  # fmt: skip
STRIKE, BROKEN = "strike", "broken-promise"
"""Kinds of decisions that are for administrators alone: they name other users."""
sharing = _table(
    "sharing", "id",
    id=Integer, resident_job=BigInteger, guest_job=BigInteger, resident_token=_TOKEN, guest_token=_TOKEN, node=_NODE,
    gpu_index=Integer, gpu_model=_MODEL, start_s=BigInteger, end_s=BigInteger, resident_rate=Double, guest_rate=Double,
    resident_rate_seen=Double, guest_rate_seen=Double, gpus=Integer, paused_s=BigInteger,
)  # fmt: skip
ban = _table("ban", "token_a token_b", token_a=_TOKEN, token_b=_TOKEN, at_s=BigInteger)
job = _table(
    "job", "id",
    id=Integer, job_key=String(40), job_id=BigInteger, uid=BigInteger, first_submit_s=BigInteger,
    submit_s=BigInteger, restarts=Integer, start_s=BigInteger, end_s=BigInteger, token=_TOKEN, tag=Text,
)  # fmt: skip
counter = _table("counter", "name", name=String(32), value=BigInteger)
schema_version = _table("schema_version", "version", version=Integer, name=String(80), applied_s=BigInteger)


_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
_CREATE_LEDGER = """CREATE TABLE IF NOT EXISTS schema_version (
    version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(80) NOT NULL, applied_s BIGINT NOT NULL)"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of ``sql/``."""

    version: int
    name: str
    statements: tuple[str, ...]


def known_migrations() -> tuple[Migration, ...]:
    """The migrations of this release, in order."""
    files = [(match, path) for path in resource_dir("sql").iterdir() if (match := _NAME.fullmatch(path.name))]
    found = [Migration(int(match[1]), match[2], _statements(path.read_text())) for match, path in files]
    return tuple(sorted(found, key=lambda migration: migration.version))


def _statements(text: str) -> tuple[str, ...]:
    without_comments = re.sub(r"--.*", "", text)
    return tuple(statement for part in without_comments.split(";") if (statement := part.strip()))


def store_version(database: Database) -> int:
    """The version of the last migration applied; 0 for an empty database."""
    with database.read() as connection:
        return _version(connection)


def _version(connection: Connection) -> int:
    if not inspect(connection).has_table("schema_version"):
        return 0
    return connection.scalar(select(func.max(schema_version.c.version))) or 0


def require_current(database: Database) -> None:
    """Refuse a store that this release cannot use."""
    version = store_version(database)
    latest = known_migrations()[-1].version
    if version > latest:
        raise _newer(database, version, latest)
    if version == 0:
        raise StoreError(f"{database.where}: holds no gpushare store", "Make it with: gpushare db migrate.")
    if version < latest:
        raise StoreError(
            f"{database.where}: its schema {version} is older than this release's {latest}",
            "Bring it up to date with: gpushare db migrate.",
        )


def migrate(
    database: Database, migrations: tuple[Migration, ...] | None = None, *, copy_first: bool = True
) -> list[Migration]:
    """Bring the store to this release's schema; returns what was applied.

    An SQLite store of an older release is copied first, to ``NAME.schema-N``: with that file the older release can be
    gone back to. Each migration and its entry in the ledger are one transaction. MariaDB commits at every CREATE, so a
    migration cut short there is simply run again: its statements say IF NOT EXISTS.
    """
    migrations = known_migrations() if migrations is None else migrations
    applied: list[Migration] = []
    before = store_version(database)
    if copy_first and database.path is not None and 0 < before < migrations[-1].version:
        copy = database.path.with_name(f"{database.path.name}.schema-{before}")
        copy.unlink(missing_ok=True)
        database.copy_to(copy)
    with database.write(alone=False) as connection:
        connection.exec_driver_sql(_CREATE_LEDGER)
    for migration in migrations:
        with database.write(alone=False) as connection:
            version = _version(connection)
            if version > migrations[-1].version:
                raise _newer(database, version, migrations[-1].version)
            if migration.version <= version:
                continue
            for statement in migration.statements:
                connection.exec_driver_sql(statement)
            row = {"version": migration.version, "name": migration.name, "applied_s": int(time.time())}
            connection.execute(schema_version.insert(), row)
        applied.append(migration)
    return applied


def _newer(database: Database, version: int, latest: int) -> StoreError:
    return StoreError(
        f"{database.where}: its schema {version} is newer than this release's {latest}",
        "Update slurm-gpushare here, or point StoreUrl elsewhere.",
    )
