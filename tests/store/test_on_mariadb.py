"""Everything that the unit tests ask of the store, asked of MariaDB."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpushare_lab.testbed import database
from gpushare_lab.testbed.layout import Layout
from sqlalchemy import create_engine

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.maintenance import backup
from slurm_gpushare.store.schema import Migration, known_migrations, migrate, store_version
from slurm_gpushare.store.spool import Inbox, StopOrders

UNIT = Path(__file__).parents[1] / "unit"
MODULES = ("combine", "hookfile", "ingest", "killed", "memory", "privacy", "prune", "schema")


def _run_on(url: str, *names: str) -> str:
    """What pytest prints of the unit tests `names`, all of which pass with the database at `url`."""
    files = [str(UNIT / f"test_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    result = subprocess.run(
        command, env={**os.environ, "GPUSHARE_TEST_STORE": url}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.timeout(1800)
def test_the_unit_tests_of_the_store_pass(mariadb_url: str) -> None:
    said = _run_on(mariadb_url, *(f"store_{name}" for name in MODULES))
    assert " 1 skipped" in said, "a server looks after its pages by itself"


def test_the_helpers_lease_is_a_row_that_one_of_several_takes(mariadb_url: str) -> None:
    _run_on(mariadb_url, "lease")


def test_a_database_that_is_not_there(mariadb: Path) -> None:
    with pytest.raises(StoreError, match="no such database"):
        Store(f"mysql+pymysql://root@localhost/ghost?unix_socket={mariadb}")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no database server answers there"):
        Store(f"mysql+pymysql://root@localhost/ghost?unix_socket={tmp_path}/nothing")


def test_a_wrong_password_is_not_shown(mariadb: Path) -> None:
    with pytest.raises(StoreError, match="refuses this user or password") as caught:
        Store(f"mysql+pymysql://nobody:hunter2@localhost/ghost?unix_socket={mariadb}")
    assert "hunter2" not in str(caught.value)


def test_an_empty_database_wants_a_migration(mariadb_url: str) -> None:
    with pytest.raises(StoreError, match="holds no gpushare store"):
        Store(mariadb_url)


def test_a_migration_cut_short_is_run_again(mariadb_url: str) -> None:
    """MariaDB commits at every CREATE TABLE, so half of a migration may be there."""
    database = Database(mariadb_url)
    first = known_migrations()[0]
    broken = Migration(first.version, first.name, (*first.statements[:5], "CREATE NONSENSE"))
    with pytest.raises(StoreError):
        migrate(database, (broken,))
    assert store_version(database) == 0
    assert migrate(database) == list(known_migrations())


def test_a_node_needs_no_rights_but_to_leave_records_and_to_read_who_is_to_stand_still(
    mariadb_url: str, mariadb: Path
) -> None:
    store = Store.create(mariadb_url)
    name = mariadb_url.partition("localhost/")[2].partition("?")[0]
    root = create_engine(mariadb_url)
    with root.begin() as connection:
        connection.exec_driver_sql("CREATE OR REPLACE USER node@localhost IDENTIFIED BY 'x'")
        connection.exec_driver_sql(f"GRANT INSERT ON {name}.inbox TO node@localhost")
        connection.exec_driver_sql(f"GRANT SELECT ON {name}.stop_order TO node@localhost")
    node = Database(f"mysql+pymysql://node:x@localhost/{name}?unix_socket={mariadb}")
    Inbox(node).deliver(b"MUNGE:sealed:")
    assert [arrival.credential for arrival in store.inbox.take(5)] == [b"MUNGE:sealed:"]
    for number in (1, 2):
        store.stop_orders.put({"n7": f"{number} 5", "n8": f"{number} -"})
        assert StopOrders(node).of("n7") == f"{number} 5"
    with pytest.raises(StoreError), node.read() as connection:
        connection.exec_driver_sql("SELECT * FROM workload")


def test_backup_points_to_the_databases_own_tool(mariadb_url: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="mariadb-dump"):
        backup(Database(mariadb_url), tmp_path / "copy")


def test_a_new_data_directory_costs_no_other_server_its_temporary_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts empties its tmpdir of them: of two testbeds that began at once, one failed."""
    for_all = tmp_path / "tmp"
    for_all.mkdir()
    monkeypatch.setenv("TMPDIR", str(for_all))
    others = for_all / "#sql-temptable-2f-1-0.MAI"
    others.touch()
    layout = Layout(tmp_path / "db")
    layout.root.mkdir()
    database.prepare(layout)
    assert others.exists()
    assert (database.data_dir(layout) / "mysql").is_dir()
