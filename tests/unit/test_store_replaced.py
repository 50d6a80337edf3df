"""The store's file deleted or replaced while it is open: nothing is written to a file that nobody will find again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_gpushare.cli.main import main
from slurm_gpushare.helper.lease import Lock
from slurm_gpushare.store import Store, StoreError, StoreReplaced
from slurm_gpushare.store.maintenance import backup

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.create(f"sqlite:///{path}") as store:
        store.counters.add({"kept": 1})
        yield store


def lose(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)


def test_nothing_is_written_to_a_deleted_store(store: Store, path: Path) -> None:
    lose(path)
    with pytest.raises(StoreReplaced, match="was deleted while in use"):
        store.counters.add({"lost": 1})
    with pytest.raises(StoreReplaced):
        store.counters.all()


def test_nothing_is_written_to_a_store_that_another_file_replaced(store: Store, path: Path, tmp_path: Path) -> None:
    backup(store.database, tmp_path / "backup")
    store.counters.add({"later": 1})
    shutil.move(tmp_path / "backup", path)
    with pytest.raises(StoreReplaced, match="was replaced by another file"):
        store.counters.add({"lost": 1})
    assert not store.database.put_back(), "what is there now was put there on purpose"
    store.close()
    with Store(f"sqlite:///{path}") as other:
        assert other.counters.all() == {"kept": 1, "writer": 0}


def test_a_file_that_goes_in_the_middle_of_a_write_is_noticed_before_the_write_counts(store: Store, path: Path) -> None:
    with pytest.raises(StoreReplaced), store.database.write():
        lose(path)


def test_a_deleted_store_comes_back_from_what_is_still_open(store: Store, path: Path) -> None:
    store.counters.add({"latest": 7})
    lose(path)
    assert store.database.put_back()
    assert path.stat().st_mode & 0o777 == 0o600
    with Store(f"sqlite:///{path}") as again:
        assert again.counters.all() == {"kept": 1, "latest": 7, "writer": 0}
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_a_deleted_directory_is_said_and_waited_for(store: Store, path: Path, tmp_path: Path) -> None:
    lose(path)
    moved = tmp_path.with_name(tmp_path.name + "-away")
    tmp_path.rename(moved)
    with pytest.raises(StoreError, match=r"cannot be (created|written anew): No such file"):
        store.database.put_back()
    moved.rename(tmp_path)
    assert store.database.put_back()


class TestRestore:
    """``gpushare db restore`` from whatever a fault has left."""

    @pytest.fixture
    def copy(self, store: Store, tmp_path: Path) -> Path:
        backup(store.database, tmp_path / "copy")
        store.counters.add({"after the copy": 1})
        store.close()
        return tmp_path / "copy"

    @pytest.fixture
    def run(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
        conf = path.parent / "gpushare.conf"
        conf.write_text(f"StoreUrl=sqlite:///{path}\nStateDir={path.parent}/state\n")
        monkeypatch.setenv("GPUSHARE_CONF", str(conf))

        def run(*argv: str) -> tuple[int, str]:
            with pytest.raises(SystemExit) as stop:
                main(list(argv))
            out, err = capsys.readouterr()
            return int(stop.value.code or 0), out + err

        return run

    @pytest.mark.parametrize("fault", ["none", "deleted", "truncated", "garbage", "a directory's worth of zeros"])
    def test_the_copy_is_the_store_again_and_what_was_there_is_kept(
        self, run: Run, path: Path, copy: Path, fault: str
    ) -> None:
        if fault == "deleted":
            lose(path)
        elif fault != "none":
            path.write_bytes({"truncated": path.read_bytes()[:5000], "garbage": b"garbage"}.get(fault, bytes(100_000)))
        code, said = run("db", "restore", "-y", str(copy))
        assert (code, "restored from" in said) == (0, True), said
        assert run("db", "check")[0] == 0
        with Store(f"sqlite:///{path}") as store:
            assert store.counters.all() == {"kept": 1, "writer": 0}
        kept = [file for file in path.parent.iterdir() if ".before-" in file.name and not file.name.endswith("-shm")]
        assert bool(kept) == (fault != "deleted")
        assert path.stat().st_mode & 0o777 == 0o600

    def test_a_damaged_copy_is_refused_and_the_store_stays(self, run: Run, path: Path, copy: Path) -> None:
        copy.write_bytes(copy.read_bytes()[:9000] + bytes(9000))
        code, said = run("db", "restore", "-y", str(copy))
        assert code != 0, said
        with Store(f"sqlite:///{path}") as store:
            assert store.counters.all()["after the copy"] == 1

    def test_a_helper_that_runs_is_not_robbed_of_its_store(self, run: Run, path: Path, copy: Path) -> None:
        with Lock(path.parent / "state"):
            code, said = run("db", "restore", "-y", str(copy))
        assert code == 1
        assert "a helper runs already" in said
        assert "Stop it first" in said
