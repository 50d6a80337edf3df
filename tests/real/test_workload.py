"""Emulated jobs on a real Slurm: the card that Slurm names, the speed that the pairs table says."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.jobs import show, submit, wait_for
from slurm_gpushare.testbed.processes import wait_until

WORKLOAD = f"exec {sys.executable} -m slurm_gpushare.testbed.workload"
PAIRS = "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\nsmall,large,V100,1,0.40,0.85\n"


def result(log: Path) -> dict[str, float]:
    """The figures of a job's last line."""
    word, *fields = log.read_text().splitlines()[-1].split()
    assert word == "done", log.read_text()
    return {name: float(value) for name, value in (field.split("=") for field in fields)}


def test_two_jobs_on_one_typed_shard_slow_each_other_as_the_pairs_table_says(testbed: Testbed) -> None:
    work = testbed.layout.home / "slowed"
    work.mkdir(exist_ok=True)
    (work / "pairs.csv").write_text(PAIRS)
    (work / "large").unlink(missing_ok=True)

    def start(profile: str, work_s: float) -> int:
        command = f"{WORKLOAD} --pairs pairs.csv --profile {profile} --work-s {work_s} --epochs 2"
        place = ("--gres=shard:v100_1:1", "--nodelist=gpu1")
        return submit(testbed, command, *place, f"--output={work}/{profile}", cwd=work)

    jobs = [start("large", 8)]
    assert wait_until(lambda: (work / "large").exists() and "training" in (work / "large").read_text(), 20)
    jobs.append(start("small", 1.2))
    wait_for(testbed, jobs, ["COMPLETED"])
    small, large = result(work / "small"), result(work / "large")
    assert abs(small["isd_pct"] - 100 * (1 / 0.40 - 1)) < 3
    lost_s = small["time_s"] * (1 - 0.85)  # `large` was slowed only while `small` was there
    assert abs(large["time_s"] - (8 + lost_s)) < 0.03 * 8


def test_a_requeued_job_goes_on_where_it_was_on_another_node(testbed: Testbed) -> None:
    log = testbed.layout.home / "requeued"
    log.unlink(missing_ok=True)
    command = f"{WORKLOAD} --work-s 4 --epochs 20"
    place = ("--gres=shard:v100_0:1", "--nodelist=gpu0")
    job = submit(testbed, command, *place, "--requeue", "--open-mode=append", f"--output={log}")
    assert wait_until(lambda: log.exists() and "epoch 5/" in log.read_text(), 20)
    testbed.run(["scontrol", "requeue", str(job)])

    def resumed() -> bool:
        # Slurm puts a requeued job off by two minutes, since its node refuses it for a while ("Job credential
        # revoked"): another node takes it at once.
        if show(testbed, job)["Reason"] == "BeginTime":
            testbed.run(["scontrol", "update", f"JobId={job}", "ReqNodeList=gpu1", "StartTime=now"], check=False)
        return "resumed" in log.read_text()

    assert wait_until(resumed, 60)
    wait_for(testbed, job, ["COMPLETED"])
    done = result(log)
    assert 0 < done["work_s"] <= 3
    assert log.read_text().count("epoch 5/") == 1  # no epoch is trained twice


def test_a_job_that_does_not_fit_beside_its_neighbour_fails_alone(testbed: Testbed) -> None:
    work = testbed.layout.home / "memory"
    work.mkdir(exist_ok=True)
    (work / "first").unlink(missing_ok=True)
    place = ("--gres=shard:v100_0:1", "--nodelist=gpu0")
    first = submit(testbed, f"{WORKLOAD} --work-s 6 --mem-mib 12000", *place, f"--output={work}/first")
    assert wait_until(lambda: (work / "first").exists() and "training" in (work / "first").read_text(), 20)
    second = submit(testbed, f"{WORKLOAD} --work-s 6 --mem-mib 6000", *place, f"--output={work}/second")
    wait_for(testbed, second, ["FAILED"])
    wait_for(testbed, first, ["COMPLETED"])
    assert "torch.cuda.OutOfMemoryError" in (work / "second").read_text()
    assert result(work / "first")["isd_pct"] == 0
