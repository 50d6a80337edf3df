"""Emulated jobs on a real Slurm: the card that Slurm names, the speed that the pairs table says."""

from __future__ import annotations

import sys
from pathlib import Path

from gpushare_lab.experiment.submitting import show, submit, wait_for
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed

WORKLOAD = f"exec {sys.executable} -m gpushare_lab.job.workload"
PAIRS = "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\nsmall,large,V100,1,0.40,0.85\n"


def result(log: Path, how: str = "done") -> dict[str, float]:
    """The figures that a job printed when it ended."""
    lines = [line for line in log.read_text().splitlines() if line.startswith(how)]
    assert len(lines) == 1, log.read_text()
    return {name: float(value) for name, value in (field.split("=") for field in lines[0].split()[1:])}


def says(log: Path, words: str, timeout_s: float = 60) -> bool:
    """Whether a job prints something, now or soon."""
    return wait_until(lambda: log.exists() and words in log.read_text(), timeout_s)


def test_two_jobs_on_one_typed_shard_slow_each_other_as_the_pairs_table_says(testbed: Testbed) -> None:
    work = testbed.layout.home / "slowed"
    work.mkdir(exist_ok=True)
    (work / "pairs.csv").write_text(PAIRS)
    (work / "large").unlink(missing_ok=True)

    def start(profile: str, work_s: float) -> int:
        command = f"{WORKLOAD} --pairs pairs.csv --profile {profile} --work-s {work_s} --epochs 2"
        place = ("--gres=shard:v100_1:1", "--nodelist=gpu1")
        return submit(testbed, command, *place, f"--output={work}/{profile}", cwd=work)

    large_job = start("large", 600)
    assert says(work / "large", "training")
    wait_for(testbed, start("small", 1.2), ["COMPLETED"])
    testbed.run(["scancel", str(large_job)])
    assert says(work / "large", "stopped")
    small, large = result(work / "small"), result(work / "large", "stopped")
    assert abs(small["isd_pct"] - 100 * (1 / 0.40 - 1)) < 3
    lost_s = small["time_s"] * (1 - 0.85)  # `large` was slowed only while `small` was there
    assert abs(large["work_s"] - (large["time_s"] - lost_s)) < 0.03 * large["time_s"]


def test_a_requeued_job_goes_on_where_it_was_on_another_node(testbed: Testbed) -> None:
    log = testbed.layout.home / "requeued"
    log.unlink(missing_ok=True)
    command = f"{WORKLOAD} --work-s 8 --epochs 20"
    place = ("--gres=shard:v100_0:1", "--nodelist=gpu0")
    job = submit(testbed, command, *place, "--requeue", "--open-mode=append", f"--output={log}")
    assert says(log, "epoch 2/")
    testbed.run(["scontrol", "requeue", str(job)])

    def resumed() -> bool:
        # Slurm puts a requeued job off by two minutes, since its node refuses it for a while ("Job credential
        # revoked"): another node takes it at once.
        if show(testbed, job)["Reason"] == "BeginTime":
            testbed.run(["scontrol", "update", f"JobId={job}", "ReqNodeList=gpu1", "StartTime=now"], check=False)
        return "resumed" in log.read_text()

    assert wait_until(resumed, 120)
    wait_for(testbed, job, ["COMPLETED"])
    done = result(log)
    assert 0 < done["work_s"] <= 7.2
    assert log.read_text().count("epoch 2/") == 1  # no epoch is trained twice


def test_a_job_that_does_not_fit_beside_its_neighbour_fails_alone(testbed: Testbed) -> None:
    work = testbed.layout.home / "memory"
    work.mkdir(exist_ok=True)
    (work / "first").unlink(missing_ok=True)
    place = ("--gres=shard:v100_0:1", "--nodelist=gpu0")
    first = submit(testbed, f"{WORKLOAD} --work-s 600 --mem-mib 12000", *place, f"--output={work}/first")
    assert says(work / "first", "training")
    second = submit(testbed, f"{WORKLOAD} --work-s 6 --mem-mib 6000", *place, f"--output={work}/second")
    wait_for(testbed, second, ["FAILED"])
    assert "torch.cuda.OutOfMemoryError" in (work / "second").read_text()
    assert show(testbed, first)["JobState"] == "RUNNING"
    testbed.run(["scancel", str(first)])
    assert says(work / "first", "stopped")
    assert result(work / "first", "stopped")["isd_pct"] == 0
