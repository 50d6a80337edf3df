from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from slurm_things import node, running

from slurm_gpushare.coschedule.occupancy import occupancy
from slurm_gpushare.report.metrics import SpoolState, metrics, spool_state
from slurm_gpushare.report.status import gpu_lines
from slurm_gpushare.resources import resource_dir
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.store import Store

SAMPLE = re.compile(r'gpushare_[a-z_]+(?:\{[a-z]+="[a-z -]+"\})? [0-9.e+-]+')


@pytest.fixture
def text(tmp_path: Path) -> str:
    used = "gpu:v100_0:0(IDX:N/A),shard:v100_0:2(2/2,0/2)"
    jobs = [running(key, "n0", "gres/shard:v100_0:1") for key in ("1", "2")]
    lines = gpu_lines([node(used=used)], occupancy([node(used=used)], jobs), frozenset())
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decisions.add([Decision(1, 0, "beside"), Decision(2, 0, "beside"), Decision(3, 0, "waits")])
        store.live.beat(at_s=1_800_000_000)
        store.counters.add({"ticks": 4, "tick_ms": 120})
        return metrics(lines, [], store, SpoolState(3, 12.5, 1))


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
        "gpushare_spool_oldest_seconds 12.5",
        "gpushare_spool_rejected 1",
    ],
)
def test_figures(text: str, sample: str) -> None:
    assert sample in text.splitlines()


def test_what_is_unknown_is_absent() -> None:
    assert "helper" not in metrics([], [], None, None)


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


def test_the_dashboard_shows_only_figures_that_exist(text: str) -> None:
    dashboard = json.loads((resource_dir("share") / "grafana" / "gpushare.json").read_text())
    known = set(re.findall(r"# TYPE (gpushare_\w+)", text)) | {"gpushare_jobs", "gpushare_records_total"}
    used = {name for panel in dashboard["panels"] for name in re.findall(r"gpushare_\w+", panel["targets"][0]["expr"])}
    assert used <= known
