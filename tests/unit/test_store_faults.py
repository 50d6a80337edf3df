"""Whatever is wrong with the store, the person who runs a command reads one line that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from world import ALICE, NOW, Site, overwrite_table, record, token

from slurm_gpushare.cli.main import main
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.site import local_checks
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store import database as database_module
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.maintenance import backup, restore
from slurm_gpushare.store.schema import Migration, known_migrations, migrate, store_version

Run = Callable[..., tuple[int, str, str]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, on a site whose store is `path` unless the test says otherwise."""

    def run(*argv: str, url: str = f"sqlite:///{path}") -> tuple[int, str, str]:
        conf = path.parent / "gpushare.conf"
        conf.write_text(f"StoreUrl={url}\nSpoolDir={path.parent}/spool\nStateDir={path.parent}/state\n")
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
    migrations = known_migrations()
    applied = "".join(f"{path}: applied {m.version:04d}_{m.name}\n" for m in migrations)
    assert run("db", "migrate") == (0, applied, "")
    assert run("db", "migrate")[1] == f"{path}: up to date (schema {migrations[-1].version})\n"
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
    code, out, err = run("db", "check")
    assert (code, err) == (3, "")
    assert out == f"{path}: is not an SQLite database, or is damaged. Restore the last 'gpushare db backup'.\n"


@pytest.mark.parametrize("page", [0, 1, 2, 5, 12])
def test_a_damaged_store_is_found_by_check(run: Run, path: Path, site: Site, page: int) -> None:
    site.store.close()
    content = bytearray(path.read_bytes())
    content[page * 4096 + 100 * (not page) : (page + 1) * 4096] = b"\xff" * (4096 - 100 * (not page))
    path.write_bytes(content)
    code, out, err = run("db", "check")
    assert (code, err) == (3, "")
    assert "damaged" in out
    code, out, err = run("db", "check", "--json")
    assert (code, err) == (3, "")
    assert json.loads(out)["problems"]


def test_a_newer_schema_is_refused(run: Run, path: Path) -> None:
    Store.create(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT INTO schema_version VALUES (99, 'later', 0)")
    latest = known_migrations()[-1].version
    for argv in (["ingest"], ["db", "migrate"], ["db", "prune", "--older-than", "8d", "--yes"]):
        code, _, err = run(*argv)
        assert code == 1
        assert f"its schema 99 is newer than this release's {latest}. Update slurm-gpushare" in one_line(err)
    assert run("db", "check")[0] == 3


def test_an_older_schema_wants_a_migration(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    migrate(database, ())
    with pytest.raises(StoreError, match="holds no gpushare store"):
        Store(f"sqlite:///{path}")


def test_a_migration_that_fails_leaves_nothing_behind(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    migrate(database)
    latest = known_migrations()[-1].version
    broken = Migration(latest + 1, "broken", ("CREATE TABLE half (a INTEGER)", "CREATE NONSENSE"))
    with pytest.raises(StoreError):
        migrate(database, (*known_migrations(), broken))
    assert store_version(database) == latest
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name = 'half'").all() == []


def test_a_locked_store(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.create(f"sqlite:///{path}").close()
    monkeypatch.setattr(database_module, "_BUSY_S", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        code, _, err = run("db", "prune", "--older-than", "8d", "--yes")
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
def test_somebody_elses_store(run: Run, path: Path, mode: int, words: str) -> None:
    run("db", "migrate")
    # Not below pytest's own directory, which every pytest that starts on this machine closes to others again.
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        Path(shutil.copy(path, folder)).chmod(mode)
        (folder / "gpushare.conf").write_text(f"StoreUrl=sqlite:///{folder}/{path.name}\n")
        command = [sys.executable, "-c", _AS_NOBODY, "db", "prune", "--older-than", "8d", "--yes"]
        env = os.environ | {"GPUSHARE_CONF": f"{folder}/gpushare.conf"}
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert words in one_line(result.stderr)


_READ_ONLY_FOR_A_WHILE = """
import os, sys
from pathlib import Path
from slurm_gpushare.store import Store
from slurm_gpushare.store import StoreError
from slurm_gpushare.store.maintenance import backup
folder = Path(sys.argv[1])
os.chown(folder, 65534, 65534)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = folder / "store.sqlite"
before = Store.create(f"sqlite:///{path}")  # stays open, as the files of a killed helper stay
before.live.beat("before", 1)
path.chmod(0o400); folder.chmod(0o555)
with Store(f"sqlite:///{path}") as store:
    try:
        store.live.beat("helper", 2)
    except StoreError as error:
        print(error)
    folder.chmod(0o755); path.chmod(0o600)
    store.live.beat("helper", 3)
    print("written")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else, and no file is read-only for root")
def test_a_store_that_was_read_only_is_written_again_once_it_may_be() -> None:
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as name:
        command = [sys.executable, "-c", _READ_ONLY_FOR_A_WHILE, name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    refused, written = result.stdout.splitlines()
    assert "cannot be written" in refused
    assert written == "written"


@pytest.fixture
def site(path: Path, tmp_path: Path) -> Site:
    return Site(f"sqlite:///{path}", tmp_path / "spool")


def test_a_full_disk_loses_nothing(site: Site) -> None:
    site.tags.update({job: OwnedToken(token(job), ALICE) for job in range(1, 400)})
    paths = site.spool(*(record(job) for job in range(1, 400)))
    with site.store.database.engine.connect() as connection:  # the pool has one connection, so the limit stays
        connection.exec_driver_sql("PRAGMA max_page_count = 10")
    with pytest.raises(StoreError, match="the disk is full"):
        site.ingest.run(NOW)
    assert sorted(site.incoming.iterdir()) == sorted(paths)
    with site.store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 100000")
    assert site.ingest.run(NOW).counts["counted"] == 399


def test_backup_is_a_whole_store_and_never_overwrites(run: Run, path: Path, site: Site) -> None:
    site.tags[1] = OwnedToken(token(1), ALICE)
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


def test_a_damaged_store_is_not_copied(run: Run, path: Path) -> None:
    run("db", "migrate")
    overwrite_table(path, "run_detail")
    code, _, err = run("db", "backup", str(path.parent / "copy.sqlite"))
    assert code == 1
    assert one_line(err).startswith(f"gpushare: error: {path}: is damaged: ")
    assert err.endswith("No copy was made. Restore the last 'gpushare db backup'.\n")
    path.write_bytes(b"no database at all" * 100)
    assert (
        f"{path}: is not an SQLite database, or is damaged" in run("db", "backup", str(path.parent / "copy.sqlite"))[2]
    )
    assert not list(path.parent.glob("*copy*"))


def test_what_is_no_copy_is_not_restored_and_the_next_step_is_said(run: Run, path: Path) -> None:
    run("db", "migrate")
    for text in ("root:x:0:0\n" * 100, ""):
        (path.parent / "other").write_text(text)
        code, _, err = run("db", "restore", "--yes", str(path.parent / "other"))
        assert code == 2
        assert "not a sound copy of a store" in one_line(err)
        assert "Name another file that 'gpushare db backup' wrote." in err


@needs_root
@pytest.mark.parametrize(
    ("owner", "command", "said"),
    [
        (65534, "backup(Database(url, must_exist=True), Path(closed) / 'copy')", "{closed}/copy: cannot be written: "),
        (0, "restore(url, Path(copy))", "{path}: cannot be replaced: "),
    ],
)
def test_a_directory_that_is_not_ours_is_no_bug(owner: int, command: str, said: str) -> None:
    with tempfile.TemporaryDirectory() as made:  # pytest's own directories are closed to others
        top, closed = Path(made), Path(made) / "closed"
        top.chmod(0o755)
        closed.mkdir(0o700)
        path, copy = top / "store.sqlite", top / "copy"
        with Store.create(f"sqlite:///{path}") as store:
            backup(store.database, copy)
        os.chown(top, owner, owner)
        for file in (path, copy):
            os.chown(file, 65534, 65534)
        script = (
            "import os\nfrom pathlib import Path\nfrom slurm_gpushare.protocol.errors import GpushareError\n"
            "from slurm_gpushare.store.database import Database\n"
            "from slurm_gpushare.store.maintenance import backup, restore\n"
            f"closed, copy, url = {str(closed)!r}, {str(copy)!r}, 'sqlite:///{path}'\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            f"try:\n    {command}\nexcept GpushareError as error:\n    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.stdout.startswith(said.format(closed=closed, path=path)), done.stderr


@pytest.mark.parametrize("age", ["", "90", "d", "-1d", "1.5d", "9999999d", "1m", "0d", "6d", "100h"])
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


def test_a_password_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    """gpushare.conf is for everybody to read."""
    secret = tmp_path / "store.url"
    secret.write_text(f"sqlite:///{tmp_path}/store.sqlite\n")
    secret.chmod(0o600)
    Store.create(f"file:{secret}").close()
    assert (tmp_path / "store.sqlite").exists()
    secret.chmod(0o640)
    with pytest.raises(GpushareError, match="others may read it"):
        Store(f"file:{secret}")
    with pytest.raises(GpushareError, match="cannot be read"):
        Store(f"file:{tmp_path}/missing")


def test_doctor_finds_settings_that_users_cannot_read(tmp_path: Path) -> None:
    conf = tmp_path / "gpushare.conf"
    conf.write_text("Partitions=gpu\n")
    conf.chmod(0o640)
    (finding,) = local_checks.readable(load_config(conf))
    assert "users cannot read" in finding.found
    conf.chmod(0o644)
    assert list(local_checks.readable(load_config(conf))) == []


def test_doctor_finds_a_password_that_others_may_read(tmp_path: Path) -> None:
    conf = tmp_path / "gpushare.conf"
    conf.write_text("StoreUrl=mysql+pymysql://gpushare:secret@db/gpushare\n")
    conf.chmod(0o644)
    (finding,) = local_checks.password(load_config(conf))
    assert "secret" not in str(finding)
    conf.chmod(0o600)
    assert list(local_checks.password(load_config(conf))) == []
    conf.write_text("StoreUrl=file:/etc/slurm/gpushare.store\n")
    assert list(local_checks.password(load_config(conf))) == []


def test_a_hostile_file_does_not_become_the_store(tmp_path: Path) -> None:
    url, copy, pipe = f"sqlite:///{tmp_path}/store.sqlite", tmp_path / "copy.sqlite", tmp_path / "pipe.sqlite"
    with Store.create(url) as store:
        backup(store.database, copy)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON schema_version BEGIN DELETE FROM schema_version; END")
        connection.commit()
    os.mkfifo(pipe)
    for path, why in ((copy, "triggers or views"), (pipe, "not a file")):
        with pytest.raises(BadInput, match=why):
            restore(url, path)
