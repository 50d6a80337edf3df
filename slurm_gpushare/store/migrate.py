"""Numbered migrations: ``sql/0001_store.sql``, ``sql/0002_...``, each applied once, in order, and recorded."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, inspect, select

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, StoreError

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
    return connection.scalar(select(func.max(schema.schema_version.c.version))) or 0


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


def migrate(database: Database, migrations: tuple[Migration, ...] | None = None) -> list[Migration]:
    """Bring the store to this release's schema; returns what was applied.

    Each migration and its entry in the ledger are one transaction. MariaDB commits at every CREATE, so a
    migration cut short there is simply run again: its statements say IF NOT EXISTS.
    """
    migrations = known_migrations() if migrations is None else migrations
    applied: list[Migration] = []
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
            connection.execute(schema.schema_version.insert(), row)
        applied.append(migration)
    return applied


def _newer(database: Database, version: int, latest: int) -> StoreError:
    return StoreError(
        f"{database.where}: its schema {version} is newer than this release's {latest}",
        "Update slurm-gpushare here, or point StoreUrl elsewhere.",
    )
