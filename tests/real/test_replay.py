"""``gpushare-lab replay`` for real: a few jobs of a trace on a throw-away Slurm, and one that is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpushare_lab.testbed.processes import marked_pids, wait_until
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.release import parse_release

TRACE = "submit_s,duration_s,num_gpus\n" + "".join(f"{2 * at},{40 + 13 * (at % 5)},1\n" for at in range(12))
PAIRS = "profile_a,profile_b,gpu_model,rate_a,rate_b\na,a,V100,0.95,0.95\na,b,V100,0.9,0.95\nb,b,V100,0.9,0.9\n"


@pytest.fixture
def command(tmp_path: Path, short_tmp: Path, slurm_suite: str | None) -> list[str]:
    if os.geteuid() or shutil.which("munged") is None:
        pytest.skip("a real Slurm needs root and munge")
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "pairs.csv").write_text(PAIRS)
    files = ["--trace", str(tmp_path / "trace.csv"), "--pairs", str(tmp_path / "pairs.csv")]
    where = ["--dir", str(short_tmp / "replay"), "--json", str(tmp_path / "out.json")]
    suite = ["--slurm", slurm_suite] if slurm_suite else []
    return [sys.executable, "-m", "gpushare_lab", "replay", *files, *where, *suite, "--gpus", "2", "--load", "2"]


def test_a_trace_runs_under_one_policy_after_the_other(command: list[str], tmp_path: Path, short_tmp: Path) -> None:
    policies = ["--policy", "exclusive,packed,gpushare", "--mean-seconds", "5", "--knowledge", "oracle"]
    done = subprocess.run([*command, *policies], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == ["exclusive", "packed", "gpushare"]
    assert all(row["complete"] and row["jobs_done"] == 12 for row in rows.values())
    assert found["meta"]["clipped"] == {"short": 0, "long": 0}
    assert rows["exclusive"]["shared_fraction"] == 0.0
    assert rows["exclusive"]["cards_won"] is None
    assert rows["packed"]["shared_fraction"] > 0.5
    assert rows["packed"]["isd_max_pct"] == pytest.approx(rows["packed"]["simulated"]["isd_max_pct"], abs=4)
    assert rows["gpushare"]["cards_won"] is not None  # how many is decided by who ends when
    assert rows["gpushare"]["cards_lost"] is not None
    assert rows["gpushare"].keys() >= rows["gpushare"]["simulated"].keys() - {"start_s"}
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert "SIM_AVG_JCT_S" in done.stdout
    assert not (short_tmp / "replay").exists()


def test_jobs_of_several_gpus_run_on_one_node_and_those_that_want_all_of_it_share_it(
    command: list[str], tmp_path: Path, testbed_session: Testbed
) -> None:
    widths = [8, 4, 4, 1, 2, 4]
    rows = (f"{at},20,{gpus}\n" for at, gpus in enumerate(widths))
    (tmp_path / "trace.csv").write_text("submit_s,duration_s,num_gpus\n" + "".join(rows))
    policies = ["--policy", "gpushare", "--mean-seconds", "20", "--knowledge", "oracle", "--gpus", "4", "--multi-gpu"]
    done = subprocess.run(
        [*command, *policies, "--load", "4"], capture_output=True, text=True, timeout=900, check=False
    )
    if not parse_release(testbed_session.release).can("keeps_whole_gpus_apart"):
        assert done.returncode == 2
        assert "cannot share whole nodes" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    told = found["meta"]["multi_gpu"]
    assert (told["gangs"], told["narrowed_to_a_node"], told["others_of_several_gpus"]) == (4, 1, 1)
    (row,) = found["policies"]
    assert row["complete"]
    assert [len(stay["gpus"]) for stay in row["stays"]] == [4, 4, 4, 1, 2, 4]
    assert row["shared_fraction"] > 0
    assert row["simulated"]["shared_fraction"] > 0


def test_an_interrupted_replay_takes_its_testbed_down_and_keeps_what_it_measured(
    command: list[str], tmp_path: Path, short_tmp: Path
) -> None:
    policies = ["--policy", "packed,exclusive", "--mean-seconds", "10", "--load", "1"]
    with subprocess.Popen([*command, *policies], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("packed") and "  0 of 12 done" not in line:
                break
        run.send_signal(signal.SIGTERM)
        _, rest = run.communicate(timeout=300)
    assert run.returncode == 130, rest
    (row,) = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert row["policy"] == "packed"
    assert row["complete"] is False
    assert 1 <= row["jobs_done"] < 12
    assert wait_until(lambda: not marked_pids(short_tmp / "replay"), 60)
    assert not (short_tmp / "replay").exists()
