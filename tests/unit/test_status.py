from __future__ import annotations

import subprocess
import sys

from world import NOW, TOKEN_A, job, node, running

from slurm_gpushare.cli.console import wrapped
from slurm_gpushare.cli.status import _notes
from slurm_gpushare.helper.occupancy import occupancy
from slurm_gpushare.report.export import gpu_json
from slurm_gpushare.report.sources import LiveFigures
from slurm_gpushare.report.status import NOTHING_LIVE, GpuLine, gpu_lines, jobs_that_take_part

SHARED = "gpu:v100_0:0(IDX:N/A),shard:v100_0:2(2/2,0/2)"
TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"


def lines(live: LiveFigures = NOTHING_LIVE, used: str = SHARED) -> list[GpuLine]:
    first = running("1", "n0", "gres/shard:v100_0:1", start_s=100, tag=TAG)
    second = running("2", "n0", "gres/shard:v100_0:1", start_s=200)
    nodes = [node(used=used)]
    return gpu_lines(nodes, occupancy(nodes, [first, second]), frozenset(), NOW, live)


def test_a_line_a_gpu_with_its_jobs_in_order_of_arrival() -> None:
    shared, idle = lines()
    assert (shared.state, idle.state) == ("shared", "idle")
    assert [(occupant.key, occupant.cluster) for occupant in shared.occupants] == [("1", 1), ("2", None)]
    assert (shared.shards_used, shared.shards_total, shared.model) == (2, 2, "v100")


def test_json_calls_a_key_what_slurms_users_call_it() -> None:
    first, second = gpu_json(lines()[0])["occupants"]
    assert (first["job_id"], second["job_id"]) == ("1", "2")
    assert "key" not in first


def test_without_telemetry_utilisation_is_unknown_not_zero() -> None:
    assert lines()[0].gpu_util_pct is None


def test_utilisation_adds_up_to_no_more_than_the_card() -> None:
    live = LiveFigures({1: (70, 40), 2: (60, 20)}, {2: (10, 12)})
    shared = lines(live)[0]
    assert (shared.gpu_util_pct, shared.mem_used_pct) == (100, 60)
    assert (shared.occupants[1].expected_isd_pct, shared.occupants[1].measured_isd_pct) == (10, 12)


def test_nodes_of_other_partitions_are_left_out() -> None:
    nodes = [node()]
    assert gpu_lines(nodes, occupancy(nodes, []), frozenset({"elsewhere"}), NOW) == []


def test_a_job_knows_its_place_and_its_partner() -> None:
    first = running("1", "n0", "gres/shard:v100_0:1", start_s=100, tag=TAG)
    second = running("2", "n0", "gres/shard:v100_0:1", start_s=200, tag=TAG)
    waiting = job("3", tag=f"GS1:probe;t={TOKEN_A}")
    stranger = running("4", "n0", "gres/gpu:1")
    queue = [first, second, waiting, stranger]
    found = jobs_that_take_part(queue, occupancy([node(used=SHARED)], queue), NOW)
    assert [(entry.key, entry.card, entry.partners) for entry in found] == [
        ("1", "n0:0", ("2",)),
        ("2", "n0:0", ("1",)),
        ("3", None, ()),
    ]
    assert found[2].probe


def test_time_is_as_squeue_shows_it() -> None:
    paused = running("1", "n0", "gres/shard:v100_0:1", start_s=1000, state="SUSPENDED", tag=f"{TAG};q=50;p=1700")
    stopped = running("2", "n0", "gres/shard:v100_0:1", start_s=1000, state="STOPPED", tag=f"{TAG};q=50;s=50;p=1700s")
    assert [entry.elapsed_s for entry in jobs_that_take_part([paused, stopped], {}, 2000.0)] == [650, 1000]


def test_status_imports_no_database_and_no_numbers() -> None:
    heavy = ("numpy", "sqlalchemy", "sklearn")
    code = f"import sys, slurm_gpushare.cli.status; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_what_is_said_below_the_table_fits_80_columns() -> None:
    live = LiveFigures({}, {}, holds=(123456, 98765, 12345.6), knowledge="the site's own " * 9)
    said = [wrapped(note) for note in _notes(live, hidden=True)]
    assert len(said) == 3
    assert max(len(line) for note in said for line in note.splitlines()) <= 80
    assert " ".join(said[1].split()).endswith("98765 lost to Slurm; kept for 12345.6 s in all.")
