"""The helper's loop when its ticks fail: it waits longer each time, and goes on with another store."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from world import FakeSlurm, overwrite_table

from slurm_gpushare.helper import daemon as daemon_module
from slurm_gpushare.helper import housekeeping, loop
from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.learner import base_name
from slurm_gpushare.helper.process import backfill
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.maintenance import backup, damage
from slurm_gpushare.store.published import read_public
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.stored_jobs import EVER


@pytest.fixture
def config(tmp_path: Path) -> Config:
    places = {"StoreUrl": f"sqlite:///{tmp_path}/store.sqlite", "HookFile": f"{tmp_path}/hook.sqlite",
              "SpoolDir": f"{tmp_path}/spool", "StateDir": f"{tmp_path}/state", "PublicDir": f"{tmp_path}/public",
              "Partitions": "gpu", "TickSeconds": "1", "EpilogHold": "0"}  # fmt: skip
    path = tmp_path / "gpushare.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in places.items()))
    return load_config(path)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again at once."""
    monkeypatch.setattr(loop, "LONGEST_RETRY_S", 0.01)


@pytest.mark.parametrize("fault", ["deleted", "replaced"])
def test_the_helper_goes_on_with_the_store_that_is_there(
    config: Config, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.sqlite"
    caplog.set_level(logging.INFO, "gpushare")

    def answer(tick: int) -> None:
        if tick == 2:
            with Store(config.store_url) as store:
                store.counters.add({"before": 1})
            if fault == "replaced":
                with Store.create(f"sqlite:///{tmp_path}/other.sqlite") as store:
                    store.counters.add({"another": 1})
                (tmp_path / "other.sqlite").rename(path)
            else:
                path.unlink()
        if tick == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    slurm = FakeSlurm(on_look=answer)
    backfill(config, slurm, once=False, dry_run=False, policy=None)  # type: ignore[arg-type]
    assert slurm.looks >= 4
    with Store(config.store_url) as store:
        counters = store.counters.all()
        assert store.live.heartbeat_s()
    assert counters.get("another" if fault == "replaced" else "before") == 1, "knowledge is lost"
    assert fault in caplog.text


def test_a_store_behind_a_link_comes_back_where_it_was(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, path = tmp_path / "store.sqlite", tmp_path / "disk" / "real.sqlite"
    path.parent.mkdir()
    link.symlink_to(path)

    def answer(tick: int) -> None:
        if tick == 2:
            with Store(config.store_url) as store:
                store.counters.add({"before": 1})
            path.unlink()
        if tick == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    backfill(config, FakeSlurm(on_look=answer), once=False, dry_run=False, policy=None)
    with Store(config.store_url) as store:
        assert store.counters.all()["before"] == 1
    assert link.is_symlink()
    assert path.is_file()


def test_a_past_that_cannot_be_learned_is_said_once_and_tried_with_back_off(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpushare")
    monkeypatch.setattr(loop, "LONGEST_RETRY_S", 30.0)
    tried_s: list[float] = []

    def fail(self: object, for_s: float = 0.0) -> int:
        tried_s.append(time.monotonic())
        raise StoreError("the disk is full")

    def answer(tick: int) -> None:
        if tick == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(daemon_module.SiteKnowledge, "catch_up", fail)
    slurm = FakeSlurm(on_look=answer)
    backfill(config, slurm, once=False, dry_run=False, policy=None)
    assert slurm.looks >= 4
    assert 2 <= len(tried_s) <= 2 * slurm.looks, "with every tick, and seldom between two"
    assert caplog.text.count("event=learn-failed") == 1
    assert "works-again" not in caplog.text


@pytest.mark.parametrize("left", ["nothing", "an empty file", "the store"])
def test_a_helper_that_finds_no_store_says_that_it_begins_anew(
    config: Config, tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    if left == "an empty file":
        (tmp_path / "store.sqlite").touch()
    elif left == "the store":
        Store.create(config.store_url).close()
    backfill(config, FakeSlurm(), once=True, dry_run=False, policy=None)
    assert ("it is made anew" in caplog.text) == (left != "the store")


def test_damage_that_no_tick_reads_stops_the_helper_until_another_store_is_there(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it took in meanwhile would be lost with the file; in the spool it is not."""
    path, copy = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    caplog.set_level(logging.INFO, "gpushare")
    monkeypatch.setattr(daemon_module, "UPKEEP_S", 0.05)
    monkeypatch.setattr(housekeeping, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(housekeeping, "LOOK_SHARE", 1.0)
    beats: list[int | None] = []

    def damaged() -> bool:
        return "is damaged" in caplog.text

    def answer(tick: int) -> None:
        if tick == 2:
            with Store(config.store_url) as store:
                backup(store.database, copy)
            overwrite_table(path, "run_detail")
        elif damaged() and copy.exists():
            beats.append(HookFile(config.hook_file).heartbeat_s())
            if len(beats) == 3:
                copy.rename(path)
        elif damaged():
            os.kill(os.getpid(), signal.SIGTERM)
        assert tick < 2000

    slurm = FakeSlurm(on_look=answer)
    backfill(config, slurm, once=False, dry_run=False, policy=None)  # type: ignore[arg-type]
    assert "event=tick-failed" in caplog.text
    assert beats[1] == beats[2], "a helper that cannot use its store is not alive"
    assert caplog.text.count("event=start") == 2, "it went on with the copy"
    with Store(config.store_url) as store:
        assert damage(store.database) == ""


def test_old_decisions_are_forgotten_once_a_day_without_being_asked(config: Config) -> None:
    def said(store: Store) -> list[str]:
        return sorted(decision.kind for decision in store.decisions.of_jobs({1: EVER, 2: EVER}))

    now_s = int(time.time())
    long_ago_s = now_s - 400 * 86_400
    with Store.create(config.store_url) as store:
        store.decisions.add([Decision(1, long_ago_s, "old"), Decision(2, now_s - 86_400, "new")])
        daemon = Daemon(config, FakeSlurm(), store)
        daemon.once()
        assert said(store) == ["new"]
        store.decisions.add([Decision(1, long_ago_s, "old"), Decision(2, now_s, "last")])
        daemon.once()
        assert said(store) == ["last", "new", "old"], "not twice a day"


@pytest.mark.slow
def test_a_week_of_ticks_leaves_memory_files_and_threads_as_they_were(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look every five minutes for a week, with time that the test makes."""
    clock = [time.time() - 7 * 86_400]
    monkeypatch.setattr(daemon_module.time, "time", lambda: clock[0])
    process = psutil.Process()
    seen: list[tuple[int, int, int, int]] = []
    gc.collect()  # what other tests have left
    with Store.create(config.store_url) as store:
        daemon = Daemon(config, FakeSlurm(), store)
        for tick in range(2016):
            clock[0] += 300
            daemon.once()
            if tick in (200, 2015):
                size = (store.database.path or Path()).stat().st_size
                seen.append((process.memory_info().rss >> 20, process.num_fds(), process.num_threads(), size >> 10))
    (rss, files, threads, size), (last_rss, last_files, last_threads, last_size) = seen
    assert last_rss <= rss + 8
    assert (last_files, last_threads) == (files, threads)
    assert last_size <= size + 64


def test_the_helper_takes_a_knowledge_base_on_sighup_and_status_names_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was learned stays: it is in the store."""
    caplog.set_level(logging.INFO, "gpushare")
    told: list[str] = []
    base = replace(default_kb(), source="the site's own pairs")
    tokens = ["gs-" + "a" * 20, "gs-" + "b" * 20]

    def answer(tick: int) -> None:
        told.append(read_public(config.public_dir).knowledge if tick > 1 else "")
        if tick == 2:
            with Store(config.store_url) as store:
                store.knowledge.put({base_name("V100"): base.to_json()})
            os.kill(os.getpid(), signal.SIGHUP)
        elif "the site's own pairs" in told[-1] or tick == 60:  # some tick after the signal
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(config.state_dir / "gpushare.conf.good"))
    with Store.create(config.store_url) as store:
        store.observations.add([Observation("x", "V100", *tokens, 0.5, 1.0, 1)])
        helper = Daemon(config, FakeSlurm(on_look=answer), store)
        assert helper.run()
        learned = helper._knowledge.on("V100").rates(tokens[:1], tokens[1:]).mean[0, 0]
    assert "the site's own pairs" not in told[1]
    assert "the site's own pairs" in told[-1]
    assert "the site's own pairs" in caplog.text
    assert learned < default_kb().knowledge().rates(tokens[:1], tokens[1:]).mean[0, 0] - 0.05


def test_an_upgrade_of_slurm_under_its_settings_is_noticed_in_the_next_tick(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """The hook converts nothing until configure has written down which Slurm it is now."""
    states: list[int] = []

    def state() -> int:
        with closing(sqlite3.connect(config.hook_file)) as file:
            return int(file.execute("SELECT gangs FROM helper").fetchone()[0])

    slurm = FakeSlurm()
    config = replace(config, slurm_version="24.11.5")
    with Store.create(config.store_url) as store:
        helper = Daemon(config, slurm, store)  # type: ignore[arg-type]
        for release in (Release(24, 11, 5), Release(25, 5, 1), Release(24, 11, 5)):
            slurm.release = release
            helper.once()
            states.append(state())
    assert states == [0, -1, 0]
    assert "configured=24.11.5 running=25.05.1" in caplog.text


def test_what_users_do_in_the_spool_makes_no_ticks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create(config.store_url) as store:
        daemon, wanted = Daemon(config, FakeSlurm(), store), []  # type: ignore[arg-type]
        monkeypatch.setattr(type(daemon._tick), "want", lambda task, *_, **__: wanted.append(task))
        for name in ("incoming", "nodes"):
            (config.spool_dir / name).mkdir(parents=True, exist_ok=True)
        loop.at_once(daemon._look_for_news())
        wanted.clear()
        (config.spool_dir / "incoming" / "a.rec").touch()
        loop.at_once(daemon._look_for_news())
        assert wanted == []
        (config.spool_dir / "nodes" / "n1-7-f.rec").touch()
        loop.at_once(daemon._look_for_news())
        assert wanted == [daemon._records, daemon._tick]
