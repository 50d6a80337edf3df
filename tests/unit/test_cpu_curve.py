"""``gpushare profile --cpus``: one epoch on each number of CPUs. Outside Slurm, without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_cli_profile import GPUSHARE, job_env

from slurm_gpushare.node.profile import CurvePoint, enough

__all__ = ["job_env"]  # a fixture

RECORD: Any = None
ONE_EPOCH = 'nproc >> "$OUT"; touch "$GPUSHARE_EPOCH_FILE"; exec sleep 600'


def point(cpus: int, epoch_s: float, busy_pct: float | None = 50.0, whole: bool = True) -> CurvePoint:
    return CurvePoint(cpus, epoch_s, whole, busy_pct, 1.0, RECORD)


def test_the_fewest_that_are_nearly_as_fast_as_any_are_enough() -> None:
    found = enough([point(2, 100.0), point(4, 52.0), point(8, 50.0), point(16, 55.0)])
    assert found is not None
    assert found.cpus == 4


def test_where_no_epoch_ends_the_busiest_gpu_is_the_fastest() -> None:
    found = enough([point(2, 60.0, 30.0, whole=False), point(4, 60.0, 58.0, whole=False), point(8, 60.0, 60.0)])
    assert found is not None
    assert found.cpus == 4


def test_nothing_is_said_where_nothing_was_seen() -> None:
    assert enough([point(2, 60.0, None, whole=False)]) is None
    assert enough([]) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_command_runs_on_so_many_cpus_and_is_ended_after_its_epoch(job_env: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "cpus"
    env = {name: value for name, value in job_env.items() if not name.startswith("OMP_")}  # nproc(1) heeds them
    env["OUT"] = str(out)
    done = subprocess.run(
        [*GPUSHARE, "--cpus", "2,1", "--", "sh", "-c", ONE_EPOCH], env=env, capture_output=True, text=True
    )
    assert out.read_text().split() == ["1", "2"]
    assert done.returncode == 0, done.stderr
    assert "EPOCH_S" in done.stdout
    assert "will do (-c " in done.stdout


def test_a_command_that_fails_ends_it(job_env: dict[str, str]) -> None:
    done = subprocess.run(
        [*GPUSHARE, "--cpus", "1", "--", "sh", "-c", "exit 3"], env=job_env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "with 1 CPUs the command ended with 3" in done.stderr


@pytest.mark.parametrize(("counts", "says"), [("0", "--cpus 0"), ("two", "--cpus two"), ("9999", "this job has")])
def test_a_wrong_number_of_cpus_runs_nothing(job_env: dict[str, str], counts: str, says: str) -> None:
    done = subprocess.run([*GPUSHARE, "--cpus", counts, "--", "true"], env=job_env, capture_output=True, text=True)
    assert done.returncode == 2
    assert says in done.stderr
