"""Who opened the store once must not lock SlurmUser's helper out by the files that SQLite keeps beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.settings import DEFAULTS, Config
from slurm_gpushare.site import local_checks
from slurm_gpushare.site.finding import Level
from slurm_gpushare.store import Store
from slurm_gpushare.store.database import journal_fix
from slurm_gpushare.store.maintenance import backup, problems, restore

SLURM, OTHER = 65534, 65533
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def path() -> Iterator[Path]:
    """A store of SlurmUser's, with nobody at work. Not below pytest's directory, which is closed to others."""
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as name:
        folder = Path(name)
        os.chown(folder, SLURM, SLURM)
        file = folder / "store.sqlite"
        Store.create(f"sqlite:///{file}").close()
        yield file


def names(path: Path) -> list[str]:
    return sorted(file.name.removeprefix(path.name) for file in path.parent.iterdir())


def run_as(uid: int, path: Path, code: str) -> str:
    """What `code` prints in a process of that user's, where `url` is the store's; errors are printed too."""
    script = (
        "import os, sys\n"
        "from slurm_gpushare.protocol.errors import GpushareError\n"
        "from slurm_gpushare.store import Store\n"
        f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
        f"path, url = {str(path)!r}, 'sqlite:///{path}'\n"
        f"try:\n    {code}\nexcept GpushareError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).strip()


READ = "store = Store(url, read_only=True); print(store.counters.all() is not None); store.close()"
CHECK = (
    "from slurm_gpushare.store.database import Database; from slurm_gpushare.store.maintenance import problems\n"
    "    print(problems(Database(url, must_exist=True)))"
)
WRITE = "store = Store(url); store.live.beat('helper', 2); store.close(); print('written')"


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_root_who_reads_leaves_nothing_behind(path: Path, mode: int) -> None:
    path.chmod(mode)
    with Store(f"sqlite:///{path}", read_only=True) as store:
        store.counters.all()
        assert names(path) == ["", "-shm", "-wal"]
    assert names(path) == [""]
    path.chmod(0o600)
    assert run_as(SLURM, path, WRITE) == "written"


@needs_root
@pytest.mark.parametrize("opened", [READ, WRITE], ids=["read", "tried to write"])
def test_a_store_that_was_read_only_is_its_owner_s_again_with_its_mode(path: Path, opened: str) -> None:
    path.chmod(0o400)
    run_as(SLURM, path, opened)
    assert path.with_name("store.sqlite-shm").stat().st_mode & 0o777 == 0o400
    path.chmod(0o600)
    assert run_as(SLURM, path, WRITE) == "written"


@needs_root
def test_a_helper_that_runs_meanwhile_writes_again_at_once(path: Path) -> None:
    tried = (
        "os.chmod(path, 0o400); store = Store(url)\n"
        "    try: store.live.beat('helper', 2)\n"
        "    except GpushareError as error: print('cannot be written' in str(error))\n"
        "    os.chmod(path, 0o600); store.live.beat('helper', 3); print('written')"
    )
    assert run_as(SLURM, path, tried).splitlines() == ["True", "written"]


@needs_root
def test_a_reader_who_may_not_write_the_store_makes_no_files_in_its_owner_s_place(path: Path) -> None:
    path.parent.chmod(0o777)
    path.chmod(0o644)
    said = run_as(OTHER, path, READ)
    assert said == f"{path}: others can read it only while the helper has it open. " + (
        "Start 'gpushare backfill', or run this as SlurmUser."
    )
    assert names(path) == [""]
    with Store(f"sqlite:///{path}") as helper:
        helper.live.beat("helper", 2)
        assert run_as(OTHER, path, READ) == "True"


@needs_root
@pytest.mark.parametrize("code", [WRITE, CHECK], ids=["write", "check"])
def test_nor_does_who_tries_to_write_it(path: Path, code: str) -> None:
    path.parent.chmod(0o777)
    path.chmod(0o644)
    said = run_as(OTHER, path, code)
    assert said == f"{path}: cannot be written. Run this as SlurmUser, who must own it and its directory."
    assert names(path) == [""]


@pytest.fixture
def config(path: Path) -> Config:
    return replace(DEFAULTS, store_url=f"sqlite:///{path}", slurm_user=str(SLURM))


@needs_root
@pytest.mark.parametrize(("uid", "mode"), [(0, 0o600), (OTHER, 0o644), (SLURM, 0o400), (SLURM, 0o660)])
def test_files_that_lock_the_helper_out_are_named_with_what_mends_them(
    path: Path, config: Config, uid: int, mode: int
) -> None:
    """As another program leaves them: root's of a container without CAP_CHOWN, another reader's, too open ones."""
    with Store(config.store_url) as store:
        assert journal_fix(path) is None
        for suffix in ("-wal", "-shm"):
            file = path.with_name(path.name + suffix)
            os.chown(file, uid, uid)
            file.chmod(mode)
        (finding,) = local_checks.store(config)
        assert (finding.check, finding.level) == ("store-journal", Level.FAIL)
        assert any(finding.fix.removeprefix("Run as root: ") in problem for problem in problems(store.database))
        if uid != SLURM:
            assert finding.fix in run_as(SLURM, path, WRITE), "the helper's log says it too"
        subprocess.run(["sh", "-c", finding.fix.removeprefix("Run as root: ")], check=True)
        assert run_as(SLURM, path, WRITE) == "written"
        assert [finding.check for finding in local_checks.store(config)] == ["store"]


@needs_root
def test_a_link_beside_the_store_is_removed_and_what_it_names_stays_whose_it_is(path: Path, tmp_path: Path) -> None:
    """Root runs the command, and SlurmUser made the link."""
    mine = tmp_path / "shadow"
    mine.touch(0o600)
    link = path.with_name("store.sqlite-wal")
    link.symlink_to(mine)
    fix = journal_fix(path)
    assert fix is not None
    subprocess.run(["sh", "-c", fix], check=True)
    assert (mine.stat().st_uid, link.is_symlink()) == (0, False)
    assert journal_fix(path) is None


@needs_root
@pytest.mark.parametrize(("uid", "mode"), [(0, 0o600), (OTHER, 0o644), (SLURM, 0o444), (SLURM, 0o400)])
def test_a_store_that_the_helper_cannot_write_is_named_before_its_journal(
    path: Path, config: Config, uid: int, mode: int
) -> None:
    """Root copied it there, or it is read-only. What mends a journal would give that to the wrong owner too."""
    with Store(config.store_url):
        os.chown(path, uid, uid)
        path.chmod(mode)
        (finding,) = local_checks.store(config)
        assert (finding.check, finding.level) == ("store", Level.FAIL)
        assert "who runs the helper" in finding.found
        subprocess.run(["sh", "-c", finding.fix.removeprefix("Run as root: ")], check=True)
    assert run_as(SLURM, path, WRITE) == "written"


def test_a_restored_store_can_be_read_before_the_helper_has_opened_it(path: Path, tmp_path: Path) -> None:
    with Store(f"sqlite:///{path}") as store:
        backup(store.database, tmp_path / "copy")
    restore(f"sqlite:///{path}", tmp_path / "copy")
    with Store(f"sqlite:///{path}", read_only=True) as store:
        assert store.counters.all() is not None


@needs_root
def test_a_directory_that_is_closed_to_a_user_is_no_crash(path: Path) -> None:
    """Of users it is not even news: they need no store."""
    path.parent.chmod(0o700)
    assert run_as(OTHER, path, READ) == f"{path}: cannot be opened: Permission denied. Run this as SlurmUser."
    asked = (
        "from dataclasses import replace; from pathlib import Path\n"
        "    from slurm_gpushare.cli.console import readable_store\n"
        "    from slurm_gpushare.protocol.settings import DEFAULTS\n"
        "    print(readable_store(replace(DEFAULTS, store_url=url, source=Path(path)), loud=True))"
    )
    assert run_as(OTHER, path, asked) == "None"


def test_a_store_behind_a_link_is_restored_behind_it(path: Path, tmp_path: Path) -> None:
    link = path.with_name("link.sqlite")
    link.symlink_to(path)
    with Store(f"sqlite:///{link}") as store:
        backup(store.database, tmp_path / "copy")
    path.write_bytes(b"garbage" * 1000)
    path.with_name(path.name + "-wal").write_bytes(b"of the damaged one")
    kept = restore(f"sqlite:///{link}", tmp_path / "copy")
    assert kept is not None
    assert kept.with_name(kept.name + "-wal").exists(), "the journal belongs to the file that it is beside"
    assert link.is_symlink()
    with Store(f"sqlite:///{link}") as store:
        assert store.counters.all() is not None
