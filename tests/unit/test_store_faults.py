"""Whatever is wrong with the store, the person who runs a command reads one line that says what to do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from store_helpers import ALICE, NOW, Site, record, token

from slurm_gpushare.cli.main import main
from slurm_gpushare.errors import BadInput
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store import database as database_module
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.migrate import Migration, known_migrations, migrate, store_version
from slurm_gpushare.store.tags import JobTag

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, on a site whose store is `path` unless the test says otherwise."""

    def run(*argv: str, url: str = f"sqlite:///{path}") -> tuple[int, str, str]:
        conf = path.parent / "gpushare.conf"
        conf.write_text(f"StoreUrl={url}\nSpoolDir={path.parent}/spool\n")
        monkeypatch.setenv("GPUSHARE_CONF", str(conf))
        with pytest.raises(SystemExit) as stop:
            main(list(argv))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def one_line(err: str) -> str:
    assert err.startswith("gpushare: error: ")
    assert err.count("\n") == 1
    return err


def test_a_store_is_made_by_migrate_and_then_sound(run: Run, path: Path) -> None:
    assert run("db", "migrate") == (0, f"{path}: applied 0001_store\n", "")
    assert run("db", "migrate")[1] == f"{path}: up to date (schema 1)\n"
    code, out, _ = run("db", "check")
    assert code == 0
    assert out.endswith(f"{path}: sound\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_store_that_is_not_there(run: Run) -> None:
    code, _, err = run("db", "check")
    assert code == 1
    assert "there is no store yet. Make it with: gpushare db migrate." in one_line(err)


def test_a_directory_that_is_not_there(run: Run, path: Path) -> None:
    code, _, err = run("db", "migrate", url=f"sqlite:///{path.parent}/nowhere/store.sqlite")
    assert code == 1
    assert "cannot be created: No such file or directory" in one_line(err)


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite://", "sqlite:///relative.sqlite", "postgresql://h/d", "mysql://h/d"]
)
def test_a_url_that_cannot_be_used(run: Run, url: str) -> None:
    code, _, err = run("db", "check", url=url)
    assert code == 2
    assert "StoreUrl is sqlite:////path" in one_line(err)


def test_a_password_is_never_shown(run: Run) -> None:
    for url in ("postgresql://u:hunter2@h/d", "mysql+pymysql://u:hunter2@127.0.0.1:1/d"):
        _, out, err = run("db", "check", url=url)
        assert "hunter2" not in out + err
        one_line(err)


def test_a_file_that_is_something_else(run: Run, path: Path) -> None:
    path.write_bytes(b"hello " * 1000)
    code, _, err = run("db", "check")
    assert code == 1
    assert "is not an SQLite database, or is damaged. Restore" in one_line(err)


def test_a_damaged_store_is_found_by_check(run: Run, path: Path, site: Site) -> None:
    site.store.close()
    content = bytearray(path.read_bytes())
    content[8192:20480] = b"\xff" * 12288
    path.write_bytes(content)
    code, out, err = run("db", "check")
    assert code in {1, 3}
    assert "damaged" in out + err


def test_a_newer_schema_is_refused(run: Run, path: Path) -> None:
    Store.create(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO schema_version VALUES (99, 'later', 0)")
    for argv in (["ingest"], ["db", "migrate"], ["db", "prune", "--older-than", "1d"]):
        code, _, err = run(*argv)
        assert code == 1
        assert "its schema 99 is newer than this release's 1. Update slurm-gpushare" in one_line(err)
    assert run("db", "check")[0] == 3


def test_an_older_schema_wants_a_migration(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    migrate(database, ())
    with pytest.raises(StoreError, match="holds no gpushare store"):
        Store(f"sqlite:///{path}")


def test_a_migration_that_fails_leaves_nothing_behind(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    migrate(database)
    broken = Migration(2, "broken", ("CREATE TABLE half (a INTEGER)", "CREATE NONSENSE"))
    with pytest.raises(StoreError):
        migrate(database, (*known_migrations(), broken))
    assert store_version(database) == 1
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name = 'half'").all() == []


def test_a_locked_store(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.create(f"sqlite:///{path}").close()
    monkeypatch.setattr(database_module, "_BUSY_S", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        code, _, err = run("db", "prune", "--older-than", "1d")
    assert code == 1
    assert "locked by another process for too long" in one_line(err)


_AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from slurm_gpushare.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "words"), [(0o600, "cannot be opened"), (0o644, "cannot be ")])
def test_somebody_elses_store(run: Run, path: Path, mode: int, words: str, tmp_path: Path) -> None:
    run("db", "migrate")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    path.chmod(mode)
    command = [sys.executable, "-c", _AS_NOBODY, "db", "prune", "--older-than", "1d"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert words in one_line(result.stderr)


@pytest.fixture
def site(path: Path, tmp_path: Path) -> Site:
    return Site(f"sqlite:///{path}", tmp_path / "spool")


def test_a_full_disk_loses_nothing(site: Site) -> None:
    site.tags.update({job: JobTag(token(job), ALICE) for job in range(1, 60)})
    paths = site.spool(*(record(job) for job in range(1, 60)))
    with site.store.database.engine.connect() as connection:  # the pool has one connection, so the limit stays
        connection.exec_driver_sql("PRAGMA max_page_count = 10")
    with pytest.raises(StoreError, match="the disk is full"):
        site.ingest.run(NOW)
    assert sorted(site.incoming.iterdir()) == sorted(paths)
    with site.store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 100000")
    assert site.ingest.run(NOW).counts["counted"] == 59


def test_backup_is_a_whole_store_and_never_overwrites(run: Run, path: Path, site: Site) -> None:
    site.tags[1] = JobTag(token(1), ALICE)
    site.take(record(1))
    target = path.parent / "copy.sqlite"
    assert run("db", "backup", str(target))[0] == 0
    assert target.stat().st_mode & 0o777 == 0o600
    with Store(f"sqlite:///{target}") as copy:
        assert copy.profiles.get(token(1)) is not None
    code, _, err = run("db", "backup", str(target))
    assert code == 2
    assert "exists already" in one_line(err)
    assert list(path.parent.glob(".copy*")) == []


@pytest.mark.parametrize("age", ["", "90", "d", "-1d", "1.5d", "9999999d", "1m"])
def test_an_age_that_is_none(run: Run, age: str) -> None:
    assert run("db", "prune", "--older-than", age)[0] == 2


def test_read_only_reads_and_never_writes(site: Site, path: Path) -> None:
    store = Store(f"sqlite:///{path}", read_only=True)
    assert store.profiles.get(token(1)) is None
    with pytest.raises(StoreError, match="opened for reading only"):
        store.live.beat()


def test_the_store_is_closed_to_users_of_a_bad_url() -> None:
    with pytest.raises(BadInput):
        Store("sqlite:///")
