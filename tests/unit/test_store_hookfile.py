from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from world import ALICE, BOB, NOW, Site, record, token

from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile, HookFileError
from slurm_gpushare.store.maintenance import prune
from slurm_gpushare.store.workloads import Assignment

A, B = token(1), token(2)


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags.update({1: OwnedToken(A, ALICE), 2: OwnedToken(B, BOB)})
    site.take(record(1, mem_mib=4000.0), record(2, mem_mib=800.0))
    return site


@pytest.fixture
def hook(tmp_path: Path) -> HookFile:
    return HookFile(tmp_path / "hook.sqlite")


def rows(hook: HookFile) -> list[tuple[str, int, str]]:
    with closing(sqlite3.connect(f"file:{hook.path}?mode=ro", uri=True)) as file:
        return file.execute("SELECT token, uid, clusters FROM workload ORDER BY token").fetchall()


def assign(store: Store, *pairs: tuple[str, int]) -> None:
    store.profiles.assign([Assignment(name, "V100", cluster) for name, cluster in pairs])


def test_a_workload_is_known_to_the_hook_once_it_has_a_cluster(site: Site, hook: HookFile) -> None:
    hook.sync(site.store, NOW)
    assert rows(hook) == []
    assign(site.store, (A, 2))
    assert hook.sync(site.store, NOW) == 1
    assert rows(hook) == [(A, ALICE, "v100=2/1/4410")], "its peak and half of the headroom"
    assign(site.store, (B, 0))
    assert hook.sync(site.store, NOW) == 1
    assert rows(hook) == [(A, ALICE, "v100=2/1/4410"), (B, BOB, "v100=0/1/1210")]
    assert hook.sync(site.store, NOW) == 0


def test_every_sync_beats_the_heart(site: Site, hook: HookFile) -> None:
    assert hook.heartbeat_s() is None
    hook.sync(site.store, NOW)
    assert hook.heartbeat_s() == NOW
    hook.beat(NOW + 5)
    assert hook.heartbeat_s() == NOW + 5


def test_a_forgotten_workload_goes_from_the_file_too(site: Site, hook: HookFile) -> None:
    assign(site.store, (A, 2), (B, 1))
    hook.sync(site.store, NOW)
    with site.store.database.write() as connection:
        connection.exec_driver_sql("UPDATE run SET end_s = 1000 WHERE job_id = 1")
        connection.exec_driver_sql(f"UPDATE profile SET updated_s = 1000 WHERE token = '{A}'")
        connection.exec_driver_sql(f"UPDATE workload SET created_s = 1000 WHERE token = '{A}'")
    assert prune(site.store, 2000)["workload"] == 1
    hook.sync(site.store, NOW)
    assert [row[0] for row in rows(hook)] == [B]


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty", "other schema", "directory of another store"])
def test_a_file_that_cannot_be_used_is_replaced(site: Site, hook: HookFile, damage: str, tmp_path: Path) -> None:
    assign(site.store, (A, 2))
    hook.sync(site.store, NOW)
    content = hook.path.read_bytes()
    if damage == "truncate":
        hook.path.write_bytes(content[:5000])
    elif damage == "garbage":
        hook.path.write_bytes(b"x" * 9000)
    elif damage == "empty":
        hook.path.write_bytes(b"")
    else:
        with closing(sqlite3.connect(hook.path)) as file, file:
            file.execute("DROP TABLE helper" if damage == "other schema" else "UPDATE helper SET change_seq = 999999")
            file.execute("DELETE FROM workload")
    hook.sync(site.store, NOW)
    assert rows(hook) == [(A, ALICE, "v100=2/1/4410")]


def test_only_its_owner_may_read_it(site: Site, hook: HookFile) -> None:
    hook.sync(site.store, NOW)
    assert hook.path.stat().st_mode & 0o777 == 0o600
    assert list(hook.path.parent.glob(".hook*")) == []


def test_a_directory_that_is_not_there_is_one_line(site: Site, tmp_path: Path) -> None:
    with pytest.raises(HookFileError, match="cannot be written: No such file or directory"):
        HookFile(tmp_path / "nowhere" / "hook.sqlite").sync(site.store, NOW)


def test_readers_see_all_of_a_change_or_nothing(site: Site, hook: HookFile) -> None:
    """All clusters are re-assigned again and again while a reader looks: they must always agree."""
    assign(site.store, (A, 0), (B, 0))
    hook.sync(site.store, NOW)
    stop, torn, reads = threading.Event(), [], 0

    def read() -> None:
        nonlocal reads
        with closing(sqlite3.connect(f"file:{hook.path}?mode=ro", uri=True, timeout=5)) as file:
            while not stop.is_set():
                clusters = {row[0].partition("/")[0] for row in file.execute("SELECT clusters FROM workload")}
                reads += 1
                if len(clusters) != 1:
                    torn.append(clusters)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for cluster in range(40):
            assign(site.store, (A, cluster), (B, cluster))
            hook.sync(site.store, NOW)
    finally:
        stop.set()
        reader.join()
    assert torn == []
    assert reads > 0


_KILLED = """
import sys, time
from pathlib import Path
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.workloads import Assignment
store, hook = Store(sys.argv[1]), HookFile(Path(sys.argv[2]))
cluster = 0
while True:
    cluster += 1
    store.profiles.assign([Assignment(t, "V100", cluster) for t in sys.argv[3:]])
    hook.sync(store)
    print(cluster, flush=True)
"""


@pytest.fixture
def writer(site: Site, hook: HookFile, store_url: str) -> Iterator[subprocess.Popen[str]]:
    hook.sync(site.store, NOW)
    command = [sys.executable, "-c", _KILLED, store_url, str(hook.path), A, B]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_writer_that_is_killed_leaves_a_file_that_the_next_one_heals(
    site: Site, hook: HookFile, writer: subprocess.Popen[str]
) -> None:
    assert writer.stdout is not None
    for _ in range(5):
        writer.stdout.readline()
    writer.kill()
    writer.wait()
    hook.sync(site.store, NOW)
    clusters = {row[2].partition("/")[0] for row in rows(hook)}
    assert len(clusters) == 1
    assert hook.heartbeat_s() == NOW
