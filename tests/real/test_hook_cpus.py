"""``cpus=auto`` on a real Slurm: the curve is measured in one job, and the next asks for what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import KNOWN, UNKNOWN, home_of, place, sbatch, write_hook_file
from telemetry_bed import WAIT_TO_BE_MEASURED, begin_when_measured, ingest_until, spooled, until, workload

from slurm_gpushare.protocol.record import RecordKind, Scope
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.workloads import Assignment

AUTO = f"{KNOWN},cpus=auto"
SEEN = "echo ${SLURM_CPUS_PER_TASK:-none} $SLURM_CPUS_ON_NODE $(srun printenv SLURM_CPUS_ON_NODE | tail -n1) > ~/cpus"
EPOCH = "unset OMP_NUM_THREADS; sleep $(( 4 / $(nproc) )); touch $GPUSHARE_EPOCH_FILE; exec sleep 600"


@pytest.mark.parametrize(
    ("options", "cpus", "seen"),
    [
        ("", 4, "none 4"),
        ("-c2", 4, "4 4"),
        ("-c6 --mem=500", 4, "4 4"),
        ("-c6 --mem-per-cpu=100", 4, "4 4"),
        ("-c6", 6, "6 6"),
        ("-n2 -N1 -c1", 4, "2 4"),
        ("--cpus-per-gpu=2", 2, "none 2"),
    ],
)
def test_job_gets_the_cpus_of_its_curve(testbed: Testbed, options: str, cpus: int, seen: str) -> None:
    write_hook_file(testbed, cpus=4)
    gpu = [] if "gpus" in options else ["--gpus=1"]
    job = sbatch(testbed, *gpu, *options.split(), token=AUTO, script=SEEN)
    assert job.tag(testbed) is not None, job.said
    assert "cpus=auto: " in job.said
    place(testbed, job.job_id, index=0, node="gpu0")
    wait_for(testbed, job.job_id, ["COMPLETED"])
    assert (home_of(testbed) / "cpus").read_text().split() == [*seen.split(), str(cpus)]
    shown = show(testbed, job.job_id)
    assert shown["NumCPUs"] == str(cpus)
    if "mem-per-cpu" in options:
        assert re.search(r"mem=600M?\b", shown.get("AllocTRES") or shown["TRES"])


def test_partition_bounds_them_and_an_unknown_workload_keeps_its_own(testbed: Testbed) -> None:
    write_hook_file(testbed, cpus=6)
    testbed.run(["scontrol", "update", "PartitionName=gpu", "MaxCPUsPerNode=3"])
    try:
        job = sbatch(testbed, "--gpus=1", token=AUTO)
    finally:
        testbed.run(["scontrol", "update", "PartitionName=gpu", "MaxCPUsPerNode=UNLIMITED"])
    assert "3 CPUs instead of 1: 6 were measured" in job.said
    assert show(testbed, job.job_id)["NumCPUs"] == "3"
    write_hook_file(testbed, cpus=100_000)
    job = sbatch(testbed, "--gpus=1", token=AUTO)
    assert int(show(testbed, job.job_id)["NumCPUs"]) < 1000, "no node has so many"
    unknown = sbatch(testbed, "--gpus=1", "-c2", "--hold", token=f"{UNKNOWN},cpus=auto")
    assert "so they stay as written" in unknown.said
    assert show(testbed, unknown.job_id)["NumCPUs"] == "2"


def test_curve_measured_in_a_job_is_what_the_next_one_asks_for(testbed: Testbed) -> None:
    testbed.run(["gpushare", "db", "migrate"])
    write_hook_file(testbed)
    profile = f"gpushare profile --cpus 1,2 -- sh -c '{EPOCH}' > ~/curve"
    script = f"{WAIT_TO_BE_MEASURED}; {workload(work_s=3)}; {profile}"
    job = sbatch(testbed, "--gpus=1", "-c2", token=UNKNOWN, script=script)
    begin_when_measured(testbed, job.job_id)
    wait_for(testbed, job.job_id, ["COMPLETED"], timeout_s=180)
    assert "2 CPUs will do" in (home_of(testbed) / "curve").read_text()
    accounted = ["sacct", "-n", "-P", "-j", str(job.job_id), "-o", "AdminComment"]
    until(lambda: UNKNOWN in testbed.run(accounted).stdout)
    # The sampler's record comes after the job's end. A curve that is taken in before it is of a token that is nobody's.
    until(lambda: any(record.scope is Scope.JOB for _, record in spooled(testbed, RecordKind.FINAL)))
    ingest_until(testbed, "counted")
    sync(testbed)
    job = sbatch(testbed, "--gpus=1", token=f"{UNKNOWN},cpus=auto")
    assert "2 CPUs instead of 1, as measured" in job.said
    assert show(testbed, job.job_id)["NumCPUs"] == "2"


def sync(testbed: Testbed) -> None:
    """What the helper does once a run has come in: a cluster, and the hook's file."""
    directory: Path = testbed.layout.gpushare
    with Store(f"sqlite:///{directory}/store.sqlite") as store:
        store.profiles.assign([Assignment(UNKNOWN, "V100", 1)])
        HookFile(directory / "hook.sqlite").sync(store, anew=True)
    testbed.wait_for_hook()
