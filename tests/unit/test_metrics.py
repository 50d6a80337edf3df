from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from world import FakeSlurm, node, overwrite_table, running

from slurm_gpushare.cli import metrics as command
from slurm_gpushare.cli.main import main
from slurm_gpushare.helper.explain import placed
from slurm_gpushare.helper.occupancy import occupancy
from slurm_gpushare.helper.snapshot import GpuPlace, How, Placement
from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.history import Decision, Span, remembered_tag
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.stop_orders import LONGEST_PAUSE_S
from slurm_gpushare.protocol.tag import Paused, Tag
from slurm_gpushare.report.job_figures import Distribution
from slurm_gpushare.report.job_view import History, views_of
from slurm_gpushare.report.metrics import LastDay, SpoolState, last_day, metrics, spool_state, store_figures
from slurm_gpushare.report.status import gpu_lines
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.stored_jobs import EVER, StoredRun

NOW = 1_800_000_000
SAMPLE = re.compile(r'gpushare_[a-z_]+(?:1d)?(?:\{[a-z]+="[a-z0-9. -]+"\})? (?:NaN|[0-9.e+-]+)')
DAY = LastDay(7200.0, 36000.0, Distribution(4, 20.0, 10.0, 40.0, 40.0), 1)


@pytest.fixture
def text(tmp_path: Path) -> str:
    used = "gpu:v100_0:0(IDX:N/A),shard:v100_0:2(2/2,0/2)"
    jobs = [running(key, "n0", "gres/shard:v100_0:1") for key in ("1", "2")]
    lines = gpu_lines([node(used=used)], occupancy([node(used=used)], jobs), frozenset(), NOW)
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decisions.add([Decision(1, 0, "beside"), Decision(2, 0, "beside"), Decision(3, 0, "waits")])
        store.live.beat(at_s=1_800_000_000)
        store.counters.add({"ticks": 4, "tick_ms": 120})
        stored = replace(store_figures(store, SitePromises(25, 50), NOW), day=DAY)
    return metrics(lines, [], stored, SpoolState(3, 12.5, 1), stored.heartbeat_s)


def test_every_line_is_a_comment_or_a_sample(text: str) -> None:
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line


@pytest.mark.parametrize(
    "sample",
    [
        'gpushare_gpus{state="shared"} 1',
        'gpushare_gpus{state="idle"} 1',
        "gpushare_pairs 1",
        'gpushare_decisions_total{kind="beside"} 2',
        "gpushare_helper_heartbeat_seconds 1800000000",
        "gpushare_helper_tick_seconds_total 0.12",
        "gpushare_store_readable 1",
        "gpushare_spool_oldest_seconds 12.5",
        "gpushare_spool_rejected 1",
        "gpushare_saved_gpu_seconds_1d 7200",
        'gpushare_slowdown_ratio_1d{quantile="0.95"} 0.4',
        "gpushare_broken_promises_1d 1",
    ],
)
def test_figures(text: str, sample: str) -> None:
    assert sample in text.splitlines()


def test_what_is_unknown_is_absent_and_that_the_store_is_is_said() -> None:
    told = metrics([], [])
    assert "helper" not in told
    assert "gpushare_store_readable 0" in told.splitlines()


def families(text: str) -> set[str]:
    return set(re.findall(r"# TYPE (gpushare_\w+)", text))


def test_every_metric_is_there_from_the_first_day_on(text: str, tmp_path: Path) -> None:
    with Store.create(f"sqlite:///{tmp_path}/new.sqlite") as store:
        first = metrics([], [], store_figures(store, SitePromises(25, 50), time.time()), SpoolState(0, 0.0, 0), 0)
    assert families(first) == families(text)
    samples = {line.split()[0]: line.split()[1] for line in first.splitlines() if not line.startswith("#")}
    for name in (
        'cards_total{outcome="won"}',
        'decisions_total{kind="waits"}',
        "pauses_total",
        'jobs{state="pending"}',
    ):
        assert samples[f"gpushare_{name}"] == "0"
    assert samples['gpushare_slowdown_ratio_1d{quantile="0.5"}'] == "NaN", "nobody was slowed, which is not 0 %"


def run(job_id: int, start_s: float, end_s: float) -> StoredRun:
    return StoredRun(job_id, job_id, "gs-x", job_id, True, "n0", 0, "V100", start_s, end_s, 0.0, 0.0, None)


def test_the_last_day_counts_what_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000
    spans = [
        Span(1, 2, "gs-a", "gs-b", "n0", 0, "V100", now - 90_000, now - 82_800, 0.9, 0.9, 0.8, 0.5),
        Span(3, 4, "gs-a", "gs-b", "n0", 0, "V100", now - 3600, None, 0.9, 0.7),
        Span(5, 6, "gs-a", "gs-b", "n0", 0, "V100", now - 200_000, now - 190_000, 0.9, 0.7, 0.9, 0.7),
    ]
    runs = [run(1, now - 93_600, now - 80_000), run(2, now - 90_000, now - 82_800)]
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.sharing.begin(spans)
        ids = {span.guest_job: span.id for span in store.sharing.of_jobs(dict.fromkeys((2, 4, 6), EVER))}
        store.sharing.end({ids[2]: now - 82_800, ids[6]: now - 190_000})
        store.sharing.seen({ids[2]: 0.8}, {ids[2]: 0.5})
        monkeypatch.setattr(store.runs, "between", lambda start_s, end_s: iter(runs))
        found = last_day(store, SitePromises(25, 50), now)
    assert found.shared_gpu_s == 3600 + 3600, "an hour of the first lies before"
    assert found.saved_gpu_s == pytest.approx(3600 * 0.3 + 3600 * 0.6)
    assert found.isd_pct.count == 2
    assert found.isd_pct.max == pytest.approx(100)
    assert found.past_promise == 1


@pytest.mark.parametrize(
    ("decisions", "tag"),
    [
        ([("beside", -1000, {}), ("paused", -800, {}), ("resumed", -400, {})], Tag(paused_before_s=400)),
        ([("beside", -1000, {}), ("paused", -100, {})], Tag(paused=Paused(NOW - 100))),
        ([("beside", -1000, {"max_isd_pct": 10})], Tag(max_isd_pct=10)),
        ([("alone", -2000, {}), ("succeeds", -1000, {})], Tag(successor=True)),
        ([], Tag()),
    ],
    ids=["paused", "ended in its pause", "its owner's own promise", "successor", "guest"],
)
@pytest.mark.parametrize("seen", [0.6, 0.7, 0.85, 0.95])
def test_the_last_day_and_the_report_say_the_same_of_a_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    decisions: list[tuple[str, int, dict[str, int]]],
    tag: Tag,
    seen: float,
) -> None:
    stood_s = int(tag.paused_s(NOW))
    span = Span(1, 2, "gs-a", "gs-b", "n0", 0, "V100", NOW - 1000, NOW, 0.9, 0.9, 0.9, seen, paused_s=stood_s)
    made = [Decision(2, NOW + at_s, kind, reasons=reasons) for kind, at_s, reasons in decisions]
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.sharing.begin([span])
        store.decisions.add(made)
        monkeypatch.setattr(store.runs, "between", lambda start_s, end_s: iter([run(2, NOW - 1000, NOW)]))
        day = last_day(store, SitePromises(25, 50), NOW)
    accounted = AccountedJob(
        2, "2", "site", 1000, "ann", "lab", "gpu", "COMPLETED", NOW - 1000, None, NOW - 1000, NOW, 1000, None,
        4, ("n0",), 0, 1, tag,
    )  # fmt: skip
    (view,) = views_of([accounted], History([span], complete=True), SitePromises(25, 50), NOW)
    assert day.isd_pct.max == pytest.approx(view.measured_isd_pct)
    assert day.past_promise == view.past_promise


@pytest.mark.parametrize("how", [How.ALONE, How.BESIDE, How.TOGETHER, How.SUCCEEDS])
def test_a_placement_remembers_the_promise_that_the_owner_asked_for(how: How) -> None:
    """Accounting has the tag, and metrics do without accounting."""
    job = running("1", "n0", "gres/shard:v100_0:1", admin_comment="GS1:c=1;m=10")
    tag = remembered_tag([placed(job, Placement("1", GpuPlace("n0", (0,)), how), None, "gpushare", NOW)], NOW)
    assert tag == Tag(max_isd_pct=10, successor=how is How.SUCCEEDS)


def test_a_pause_without_an_end_is_no_longer_than_a_pause_may_be() -> None:
    """The helper was away, and Slurm or its administrator let the job go on."""
    tag = remembered_tag([Decision(2, NOW - 9000, "paused"), Decision(2, NOW - 600, "paused")], NOW)
    assert tag.paused_before_s == 2 * LONGEST_PAUSE_S


def test_the_spool_is_counted_by_its_files(tmp_path: Path) -> None:
    assert spool_state(tmp_path) is None
    (tmp_path / "incoming").mkdir()
    record = tmp_path / "incoming" / "gpu0-1-x-f.rec"
    record.touch()
    os.utime(record, (time.time() - 60, time.time() - 60))
    found = spool_state(tmp_path)
    assert found is not None
    assert (found.waiting, found.rejected) == (1, 0)
    assert found.oldest_s >= 59


@pytest.mark.parametrize("file", ["grafana/gpushare.json", "prometheus/gpushare.rules.yml"])
def test_dashboard_and_alerts_use_only_figures_that_exist(text: str, file: str) -> None:
    written = (resource_dir("share") / file).read_text()
    if file.endswith(".json"):
        expressions = [target["expr"] for panel in json.loads(written)["panels"] for target in panel["targets"]]
    else:
        expressions = re.findall(r"^ +expr: (.+)$", written, re.MULTILINE)
        assert len(expressions) == written.count("- alert: ") == written.count("summary: ") >= 8
    used = {name for expression in expressions for name in re.findall(r"gpushare_\w+", expression)}
    assert used
    assert used <= families(text)


def _nonsense(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE counter SET value = 'yesterday' WHERE name = 'alive_helper'")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another file": lambda path: path.write_bytes(b"hello " * 5000),
    "its counters": lambda path: overwrite_table(path, "counter"),
    "its spans": lambda path: overwrite_table(path, "sharing"),
    "a row": _nonsense,
    "away": Path.unlink,
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_without_the_store_monitoring_still_sees_the_helpers_heartbeat(
    damage: str, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hook_file = tmp_path / "store.sqlite", tmp_path / "hook.sqlite"
    conf = tmp_path / "gpushare.conf"
    conf.write_text(f"StoreUrl=sqlite:///{path}\nHookFile={hook_file}\nSpoolDir={tmp_path}\nPartitions=gpu\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    monkeypatch.setattr(command, "connect", lambda: FakeSlurm([], [node()]))
    (tmp_path / "incoming").mkdir()
    with Store.create(f"sqlite:///{path}") as store:
        store.live.beat(at_s=NOW)
        HookFile(hook_file).sync(store, 0 if stopped else NOW)
    DAMAGE[damage](path)
    with pytest.raises(SystemExit) as stop:
        main(["metrics"])
    out, err = capsys.readouterr()
    told = out.splitlines()
    assert not stop.value.code
    assert "gpushare_store_readable 0" in told
    assert f"gpushare_helper_heartbeat_seconds {0 if stopped else NOW}" in told
    assert {"gpushare_gpus", "gpushare_jobs", "gpushare_spool_waiting"} <= families(out)
    assert err.count("\n") == 1
    assert err.endswith("Figures that come from it are left out.\n")
    for line in told:
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line


def test_without_slurmctld_no_figure_of_its_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> NoReturn:
        raise ControllerDown("sinfo: cannot contact slurm controller", "Check that slurmctld runs.")

    slurm = FakeSlurm()
    monkeypatch.setattr(slurm, "nodes", away)
    conf, output = tmp_path / "gpushare.conf", tmp_path / "gpushare.prom"
    conf.write_text(
        f"StoreUrl=sqlite:///{tmp_path}/store.sqlite\nHookFile={tmp_path}/hook.sqlite\nSpoolDir={tmp_path}\n"
    )
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    monkeypatch.setattr(command, "connect", lambda: slurm)
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.live.beat(at_s=NOW)
    output.write_text("gpushare_pairs 4\n")
    with pytest.raises(SystemExit) as stop:
        main(["metrics", "--output", str(output)])
    assert not stop.value.code
    told = output.read_text()
    assert not {"gpushare_pairs", "gpushare_gpus", "gpushare_jobs"} & families(told)
    assert {"gpushare_store_readable 1", f"gpushare_helper_heartbeat_seconds {NOW}"} <= set(told.splitlines())
    assert capsys.readouterr().err.endswith("slurmctld runs. Figures that come from Slurm are left out.\n")


def test_the_heartbeat_is_the_stores_where_another_controller_has_the_helper(tmp_path: Path) -> None:
    """Its own hook's file is as old as the last time that the helper ran there."""
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        HookFile(tmp_path / "hook.sqlite").sync(store, NOW - 9000)
        store.live.beat(at_s=NOW)
        stored = store_figures(store, SitePromises(25, 50), NOW)
    assert command._heartbeat_s(tmp_path / "hook.sqlite", stored) == NOW
    assert command._heartbeat_s(tmp_path / "hook.sqlite", None) == NOW - 9000
    assert command._heartbeat_s(tmp_path / "absent.sqlite", None) is None, "unknown, not never"
