"""What ``gpushare-lab simulate`` says to unusable input: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gpushare_lab.cli.main import main
from gpushare_lab.peers.trace_jobs import make_workload, read_any_trace, read_rates

from slurm_gpushare.knowledge.tables import read_pairs

TRACE = "submit_s,duration_s,num_gpus,group\n5,10,1,a\n0,20,1,a\n7,30,1,b\n1,30,4,b\n"
PAIRS = "profile_a,profile_b,gpu_model,rate_a,rate_b\na,a,V100,0.9,0.7\na,b,V100,0.6,1.2\nb,b,V100,,\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace, pairs = tmp_path / "trace.csv", tmp_path / "pairs.csv"
    trace.write_text(TRACE)
    pairs.write_text(PAIRS)
    return trace, pairs


def run(files: tuple[Path, Path], *more: str) -> int:
    arguments = ["simulate", "--trace", str(files[0]), "--pairs", str(files[1]), *more]
    if "--gpus" not in more:
        arguments += ["--gpus", "2"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def test_world_is_built_as_specified(files: tuple[Path, Path]) -> None:
    rates = read_rates(files[1])
    assert rates.profiles == ("a", "b")
    np.testing.assert_allclose(rates.rate, [[0.8, 0.6], [1.0, np.nan]])
    work = make_workload(read_any_trace(files[0]), rates, gpus=2, jobs=None, load=1.5, seed=3)
    assert work.duration_s.tolist() == [20, 10, 30]
    assert work.submit_s[0] == 0
    assert work.duration_s.sum() / (2 * work.submit_s[-1]) == pytest.approx(1.5)
    assert work.profile.tolist() == np.random.default_rng(3).integers(2, size=3).tolist()
    as_traced = make_workload(read_any_trace(files[0]), rates, gpus=4, jobs=2, load=0, seed=3, multi_gpu=True)
    assert as_traced.submit_s.tolist() == [0, 1]
    assert as_traced.num_gpus.tolist() == [1, 4]


def test_json_has_every_figure_of_every_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(files, "--policy", "all", "--load", "0,1.2", "--seed", "1,2", "--json", str(out)) == 0
    data = json.loads(out.read_text())
    assert data["meta"]["knowledge"] == "learned"
    assert len(data["policies"]) == 4 * 16
    wanted = "avg_jct_s p50_jct_s p99_jct_s avg_wait_s makespan_s ps_pct isd_mean_pct isd_p95_pct isd_max_pct"
    wanted += " shared_fraction busy_gpu_hours energy_kwh max_wait_s resident_isd_p99_pct guest_isd_p99_pct wall_s"
    wanted += " policy load seed first single_p99_wait_s"
    assert set(data["policies"][0]) == set(wanted.split())


def test_telemetry_is_where_knowledge_starts(files: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(files, "--knowledge", "telemetry") == 2, "it needs --profiles"
    names = read_pairs(files[1]).names
    shares = "".join(f"{name},V100,{20 + 10 * at},{10 + 5 * at}\n" for at, name in enumerate(names))
    (tmp_path / "p.csv").write_text("profile,gpu_model,gpu_util_mean_pct,mem_access_mean_pct\n" + shares)
    out = tmp_path / "out.json"
    words = ("--policy", "gpushare", "--profiles", str(tmp_path / "p.csv"), "--knowledge", "telemetry")
    assert run(files, *words, "--json", str(out)) == 0
    data = json.loads(out.read_text())
    assert data["meta"]["knowledge_from"] == "telemetry and the shipped base"
    assert data["policies"][0]["first"]["jobs"] <= 1000


def test_one_gpu_and_one_job_is_enough(files: tuple[Path, Path]) -> None:
    assert run(files, "--gpus", "1", "--jobs", "1") == 0


@pytest.mark.parametrize("option", ["cold", "oracle"])
def test_knowledge_can_be_chosen(files: tuple[Path, Path], option: str) -> None:
    for durations in ("limit", "history"):
        assert run(files, "--knowledge", option, "--durations", durations, "--order", "sjf", "--multi-gpu") == 0


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("", "no column submit_s"),
        ("submit_s,duration_s,num_gpus\n", "has no rows"),
        ("submit_s,duration_s\n1,2\n", "no column num_gpus"),
        ("submit_s,duration_s,num_gpus\n1,,1\n", ":2: duration_s is '', not a number"),
        ("submit_s,duration_s,num_gpus\n1,2\n", ":2: num_gpus is '', not a number"),
        ("submit_s,duration_s,num_gpus\n-1,2,1\n", "submit_s -1 is negative"),
        ("submit_s,duration_s,num_gpus\n1,0,1\n", "duration_s 0 is not positive"),
        ("submit_s,duration_s,num_gpus\n1,nan,1\n", "duration_s is 'nan', not a number"),
        ("submit_s,duration_s,num_gpus\n1,2,0\n", "num_gpus 0 is not"),
        ("submit_s,duration_s,num_gpus\n1,2,1.5\n", "num_gpus 1.5 is not"),
        ("submit_s,duration_s,num_gpus\n1,2,9\n", "no job that fits"),
    ],
)
def test_bad_traces(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str, message: str
) -> None:
    files[0].write_text(trace)
    out = tmp_path / "out.json"
    assert run(files, "--json", str(out)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "-3"], "--gpus -3"),
        (["--jobs", "0"], "--jobs 0"),
        (["--jobs", "99"], "only 3 jobs"),
        (["--jobs", "1", "--load", "1.2"], "--load 1.2: impossible"),
        (["--load", "-1"], "--load -1"),
        (["--load", "inf"], "--load inf"),
        (["--load", "x"], "--load x"),
        (["--seed", "a"], "--seed a"),
        (["--policy", "best"], "no policy 'best'"),
        (["--json", "/nowhere/out.json"], "no directory"),
        (["--trace", "/nowhere.csv"], "cannot be read"),
    ],
)
def test_bad_options(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(files, *arguments) == 2
    assert message in capsys.readouterr().err


def test_unknown_profile(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles = tmp_path / "profiles.csv"
    profiles.write_text("profile,gpu_model\na,V100\n")
    assert run(files, "--profiles", str(profiles)) == 2
    assert "unknown profile 'b'" in capsys.readouterr().err
