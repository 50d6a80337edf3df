from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect, select, text
from world import record

from slurm_gpushare.protocol.record import RecordKind, encode_record
from slurm_gpushare.store import Store, schema
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.schema import METADATA, known_migrations, migrate, store_version
from slurm_gpushare.store.sharing import BrokenPromise, Strike


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        found = inspect(store.database.engine)
        assert set(found.get_table_names()) - {"sqlite_sequence"} == set(METADATA.tables)
        for table in METADATA.tables.values():
            columns = [column["name"] for column in found.get_columns(table.name)]
            assert columns == [column.name for column in table.columns], table.name
            keys = found.get_pk_constraint(table.name)["constrained_columns"]
            assert keys == [column.name for column in table.primary_key], table.name


OLD_ROWS = {
    "workload": "('gs-a', 1001, 1, 0, 1), ('gs-b', 1002, 1, 0, 1)",
    "remeasure": "('gs-a', 500)",
    "cpu_curve": "('gs-b', 6, 700)",
    "heartbeat": "('helper', 900)",
    "model": "(3, 'V100', 10, '{\"k\":3}'), (12, 'V100', 20, '{\"k\":4}'), (13, 'A100', 20, '{\"k\":5}')",
    "strike": "(1, 100, 1001, 'gs-a', 7, NULL, 'mem_used_mib', 9000.5, 4000), "
    "(2, 101, 1001, 'gs-a', 8, 9, 'mgup', 80, 20)",
    "broken_promise": "(1, 200, 7, 1001, 8, 1002, 'gpu0', 1, 25, 40.5)",
    "ingested": "(0, 'r-known', 4, 1000.5), (1001, 'r-foreign', 9, 1001.5)",
}


@pytest.fixture
def old(store_url: str) -> Iterator[Database]:
    """A store of schema 7, without any row."""
    with closing(Database(store_url)) as database:
        if not database.is_sqlite:
            with database.write(alone=False) as connection:
                for table in inspect(connection).get_table_names():
                    connection.exec_driver_sql(f"DROP TABLE {table}")
        migrate(database, tuple(step for step in known_migrations() if step.version <= 7))
        yield database


def test_a_store_of_an_older_release_keeps_every_row(old: Database, store_url: str, tmp_path: Path) -> None:
    """Tables that said the same became one; what was there before stays in a copy beside the store."""
    made = encode_record(record(5, run_id="0" * 32, kind=RecordKind.INTERIM, seq=2))
    with old.write() as connection:
        for table, rows in OLD_ROWS.items():
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES {rows}")
        run = "'kept', 1, 0, 'r-known', 4, 'gs-a', 3, 'gpu0', 0, 'V100', 900, 1000.5, 100, 0, 1, 1"
        connection.exec_driver_sql(f"INSERT INTO run VALUES (1, {run})")
        row = {"job": 5, "at_s": 50.0, "body": made}
        connection.execute(text("INSERT INTO interim VALUES (:job, 'gpu0', 0, 0, 'r5', 2, :at_s, :body)"), row)
    with Store.create(store_url) as store:
        assert store.violations.to_measure() == {"gs-a"}
        with store.database.read() as connection:
            workloads = connection.execute(select(schema.workload).order_by("token")).all()
            runs = connection.execute(select(schema.run).order_by("run_id")).all()
        assert [(row.measure_since_s, row.cpus, row.cpus_at_s) for row in workloads] == [
            (500, None, None),
            (None, 6, 700),
        ]
        assert store.live.heartbeat_s() == 900
        assert store.knowledge.clusters("V100") == (12, {"k": 4})
        assert store.knowledge.get("clusters/V100/3") == {"k": 3}
        assert store.knowledge.clusters("A100") == (13, {"k": 5})
        assert [s for s in store.violations.strikes() if s.uid == 1001] == [
            Strike(1001, "gs-a", 7, 100, "mem_used_mib", 9000.5, 4000.0),
            Strike(1001, "gs-a", 8, 101, "mgup", 80.0, 20.0, 9),
        ]
        assert store.violations.broken_promises() == [BrokenPromise(200, 7, 1001, 8, 1002, "gpu0", 1, 25.0, 40.5)]
        assert store.decisions.of_jobs([7, 8]) == [], "what names other users is for administrators"
        assert [(row.run_id, row.state, row.seq) for row in runs] == [
            ("r-foreign", "dropped", 9), ("r-known", "kept", 4), ("r5", "running", 2),
        ]  # fmt: skip
        assert store.live.of_jobs({5})[5].job_id == 5
    copy = tmp_path / "store.sqlite.schema-7"
    if store_url.startswith("sqlite"):
        with closing(Database(f"sqlite:///{copy}", read_only=True)) as database:
            assert store_version(database) == 7


def test_a_migration_that_was_cut_short_copies_nothing_twice(old: Database, store_url: str) -> None:
    """MariaDB commits at every CREATE and DROP, so all of a migration may be there but for its entry."""
    with old.write() as connection:
        connection.exec_driver_sql(f"INSERT INTO strike VALUES {OLD_ROWS['strike']}")
    if not old.is_sqlite:
        (step,) = (step for step in known_migrations() if step.version == 8)
        with old.write() as connection:
            for statement in step.statements[:-3]:
                connection.exec_driver_sql(statement)
    with Store.create(store_url) as store:
        assert len([s for s in store.violations.strikes() if s.uid == 1001]) == 2
