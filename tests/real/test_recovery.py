"""``release``, ``db restore`` and the way back from an upgrade, each from the state that a fault left."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site, pin
from telemetry_bed import endless
from world import overwrite_table

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.protocol.tag import Paused, with_tag
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def gpushare(site: Site, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command as SlurmUser gives it."""
    argv = [sys.executable, "-m", "slurm_gpushare", *words]
    return site.testbed.run(argv, user=site.testbed.slurm_user, check=check, timeout_s=120)


def store_file(site: Site) -> Path:
    return Path(site.config.store_url.removeprefix("sqlite:///"))


def backup(site: Site) -> Path:
    """A copy that ``db backup`` makes."""
    copy = store_file(site).with_name("copy.sqlite")
    copy.unlink(missing_ok=True)
    gpushare(site, "db", "backup", str(copy))
    return copy


def give(path: Path, site: Site) -> None:
    """Files of this test's process belong to SlurmUser, as the helper's own do."""
    owner = path.parent.stat()
    for part in path.parent.glob(f"{path.name}*"):
        os.chown(part, owner.st_uid, owner.st_gid)


def garble(path: Path) -> None:
    """What a broken disk leaves; the journal of a killed helper stays beside it."""
    with path.open("r+b") as file:
        file.write(os.urandom(min(path.stat().st_size, 40_000)))


def killed_helper(site: Site, *tokens: int, script: str) -> list[str]:
    """A helper that was killed just after it had placed jobs; their keys."""
    give(store_file(site), site)
    with site.process() as helper:
        jobs = [site.submit(token, script=script) for token in tokens]
        site.wait_running(jobs)
        helper.kill()
        helper.wait(60)
    return jobs


def test_release_needs_neither_store_nor_settings_nor_a_helper(site: Site) -> None:
    (paused,) = killed_helper(site, 0, script="exec sleep 600")
    placed, leased = site.submit(1), site.submit(2)
    site.block([GpuAddress("gpu0", 0), GpuAddress("gpu0", 1)] if site.jobs()[paused].nodes != ("gpu0",) else
               [GpuAddress("gpu1", 0), GpuAddress("gpu1", 1)])  # fmt: skip
    other = "gpu1" if site.jobs()[paused].nodes == ("gpu0",) else "gpu0"
    pin(site, placed, GpuAddress(other, site.index(placed)))
    with site.environment():
        slurm = connect()
        (job,) = slurm.jobs([paused])
        assert job.tag is not None
        tag = replace(job.tag, paused=Paused(int(time.time())))
        slurm.update_job(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})
    site.testbed.run(["scontrol", "suspend", paused])  # as a release before 1.0 did
    assert site.jobs()[paused].paused
    site.store.close()
    for path in (store_file(site), site.config.hook_file):
        garble(path)
    conf = site.testbed.layout.gpushare_conf
    conf.write_text(conf.read_text() + "Partitoins=gpu\n")

    gpushare(site, "release")
    jobs = site.jobs()
    assert jobs[paused].state == "RUNNING"
    for key in (placed, leased):
        tag = jobs[key].tag
        assert tag is not None
        assert (tag.placed, tag.lease) == (None, False)
        assert jobs[key].running or [str(gres) for gres in jobs[key].gres if gres.count] == [tag.original]


def test_restore_after_the_disk_broke_under_the_helper(site: Site) -> None:
    copy = backup(site)
    (job,) = killed_helper(site, 0, script=endless(60, 30, 2000))
    garble(store_file(site))
    site.testbed.run(["scancel", job])
    spool = site.config.spool_dir
    assert wait_until(lambda: bool(list(spool.glob("nodes/**/*.rec"))), 60), "the record waits for a store"
    failed = gpushare(site, "db", "check", check=False)
    assert (failed.returncode, failed.stderr) == (3, "")
    assert "damaged" in failed.stdout

    gpushare(site, "db", "restore", "--yes", str(copy))
    assert gpushare(site, "db", "check").stdout.rstrip().endswith("sound")
    with site.process(), Store(site.config.store_url) as store:
        # A record is taken in first, and counts once Slurm has said whose it is: slurmdbd may be a moment behind.
        def runs() -> list[int]:
            return [run.job_id for run in store.runs.of_tokens([TOKENS[0]]) if run.by_node]

        assert wait_until(lambda: runs() == [int(job)], 120), (runs(), list(spool.glob("**/*.rec")))
        assert wait_until(lambda: not list(spool.glob("nodes/**/*.rec")), 60), "interim and final record are taken in"
        assert runs() == [int(job)], "as one run"


def test_damage_where_no_tick_reads_stops_the_helper_and_monitoring_sees_it(site: Site) -> None:
    site.store.close()
    copy = backup(site)
    overwrite_table(store_file(site), "ban")
    give(store_file(site), site)
    log = site.testbed.dir / "log" / "backfill.log"
    with site.process(works=False):  # it may see the damage before its first tick
        assert wait_until(lambda: "is damaged" in log.read_text(), 60)
        seen_s = HookFile(site.config.hook_file).heartbeat_s()
        figures = gpushare(site, "metrics").stdout.splitlines()
        assert f"gpushare_helper_heartbeat_seconds {seen_s or 0}" in figures
        assert wait_until(lambda: log.read_text().count("is damaged") >= 2, 60)
        assert HookFile(site.config.hook_file).heartbeat_s() == seen_s, "it is not taken for alive"
    assert gpushare(site, "db", "check", check=False).returncode == 3
    gpushare(site, "db", "restore", "--yes", str(copy))
    with site.process():
        pass


def test_the_way_back_from_an_upgrade_that_was_killed(site: Site) -> None:
    copy = backup(site)
    (running,) = killed_helper(site, 0, script="exec sleep 600")
    waiting = site.submit(1)
    with site.environment():
        slurm = connect()
        (job,) = slurm.jobs([waiting])
        slurm.update_job(waiting, {"AdminComment": f"{job.admin_comment};z=later"})  # a later release's own field
    with closing(sqlite3.connect(store_file(site))) as later, later:
        later.execute("CREATE TABLE later_thing (id INTEGER)")
        later.execute("INSERT INTO schema_version VALUES (9000, 'later', 0)")
    site.store.close()

    refused = gpushare(site, "backfill", "--once", check=False)
    assert refused.returncode == 1
    assert "is newer than this release's" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) <= 2
    gpushare(site, "release")
    after = site.jobs()[waiting].tag
    assert after is not None
    assert (after.lease, after.extra) == (False, {"z": "later"}), "what a later release wrote is kept"

    gpushare(site, "db", "restore", "--yes", str(copy))
    gpushare(site, "backfill", "--once")
    assert gpushare(site, "db", "check").stdout.rstrip().endswith("sound")
    site.wait_running([running, waiting])
