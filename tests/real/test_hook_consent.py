"""Opting out of a job that waits, and what sbatch says, on a real Slurm."""

from __future__ import annotations

import sys
import time

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from hook_testbed import KNOWN, USER, home_of, is_old, refused, sbatch, write_hook_file

from slurm_gpushare.helper.changes import GUEST_NICE

OPTOUT = [sys.executable, "-m", "slurm_gpushare", "optout"]


@pytest.fixture
def shared(testbed: Testbed) -> Testbed:
    write_hook_file(testbed)
    return testbed


def eligible_s(testbed: Testbed, job_id: int) -> float:
    return time.mktime(time.strptime(show(testbed, job_id)["EligibleTime"], "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize("how", ["scontrol", "gpushare"])
def test_job_that_opts_out_gets_a_whole_gpu_at_once(shared: Testbed, how: str) -> None:
    """Its lease of 300 s ends with the change, so that it starts now."""
    job = sbatch(shared, "--gpus=1", script="echo $CUDA_VISIBLE_DEVICES ${SLURM_SHARDS_ON_NODE:-whole} > ~/where")
    assert job.tag(shared) is not None
    change = (
        ["scontrol", "update", f"JobId={job.job_id}", "Comment="] if how == "scontrol" else [*OPTOUT, str(job.job_id)]
    )
    done = shared.run(change, user=USER, check=False)
    if is_old(shared):  # this Slurm cannot turn shards into a GPU
        assert done.returncode != 0
        assert KNOWN in show(shared, job.job_id)["Comment"]
        return
    assert done.returncode == 0, done.stderr
    wait_for(shared, job.job_id, ["COMPLETED"])
    assert (home_of(shared) / "where").read_text() in {"0 whole\n", "1 whole\n"}
    assert show(shared, job.job_id)["TresPerJob"] == "gres/gpu:1"


def test_job_that_was_placed_opts_out_and_keeps_its_place(shared: Testbed) -> None:
    if is_old(shared):
        pytest.skip("this Slurm cannot turn shards into a GPU")
    job = sbatch(shared, "--gpus=1", "--begin=now+1hour", f"--comment=grant 7 gpushare:{KNOWN}", token=None)
    tag = f"note GS1:c=2;t={KNOWN};o=gpu:1;g=gpu0:1;n=7"
    place = ["Gres=shard:v100_1:1", "ReqNodeList=gpu0", f"AdminComment={tag}", f"Nice={GUEST_NICE}"]
    shared.run(["scontrol", "update", f"JobId={job.job_id}", *place])
    before = eligible_s(shared, job.job_id)
    dry = shared.run([*OPTOUT, "--dry-run", str(job.job_id)], user=USER)
    assert dry.stdout == f"{job.job_id}: would be taken out of sharing, for a whole GPU\n"
    assert show(shared, job.job_id)["Nice"] == str(GUEST_NICE)
    shared.run([*OPTOUT, str(job.job_id)], user=USER)
    shown = show(shared, job.job_id)
    assert (shown["TresPerJob"], shown["ReqNodeList"], shown["Comment"]) == ("gres/gpu:1", "(null)", "grant 7")
    assert "shard" not in shown.get("TresPerNode", "")
    assert eligible_s(shared, job.job_id) == before
    assert shown["Nice"] == "7", "the helper's would start it before everybody"
    explain = [sys.executable, "-m", "slurm_gpushare", "job", str(job.job_id)]
    assert "opted out" in shared.run(explain, user=USER).stdout
    assert Site(shared).tick().outcomes.get("opt-out:done") == 1
    assert show(shared, job.job_id)["AdminComment"] == "note"
    assert "opted out" in shared.run(explain).stdout, "the store remembers"
    assert "opted out" in shared.run(explain, user=USER).stdout, "and the helper tells the owner"
    shared.run(["scontrol", "update", f"JobId={job.job_id}", "StartTime=now"], user=USER)
    wait_for(shared, job.job_id, ["COMPLETED"])


def test_id_of_an_array_takes_all_its_waiting_tasks_out(shared: Testbed) -> None:
    if is_old(shared):
        pytest.skip("this Slurm cannot turn shards into a GPU")
    array = sbatch(shared, "--gpus=1", "--begin=now+1hour", "--array=1-3").job_id
    done = shared.run([*OPTOUT, str(array)], user=USER)
    assert sorted(done.stdout.splitlines()) == [f"{array}_{task}: out of sharing" for task in (1, 2, 3)]
    assert all(show(shared, f"{array}_{task}")["TresPerJob"] == "gres/gpu:1" for task in (1, 2, 3))


def test_what_sbatch_says_is_true_whenever_the_job_starts(shared: Testbed) -> None:
    now = sbatch(shared, "--gpus=1", "--hold").said
    assert "may share" in now
    assert "300 s" in now  # how long our lease may keep it, whatever else it waits for
    later = sbatch(shared, "--gpus=1", "--begin=now+1hour").said
    assert "may share" in later
    assert " s " not in later.partition("may share")[2]
    for comment in ("gpushare={}", "GPUSHARE:{}", "gpushare:{} max=10", "x gpushare:{},max=10%"):
        job = sbatch(shared, "--gpus=1", f"--comment={comment.format(KNOWN)}", token=None)
        tag = job.tag(shared)
        assert tag is not None
        assert tag.max_isd_pct == (10 if "max" in comment else None)
    unclear = sbatch(shared, "--gpus=1", f"--comment=gpushare:{KNOWN} max 10", token=None)
    assert "only the options max=PERCENT" in unclear.said
    assert unclear.tag(shared) is None


def test_cpus_of_the_node_that_the_helper_does_not_count_are_no_way_to_share(shared: Testbed) -> None:
    left = sbatch(shared, "--gpus=1", "--hold", "--mincpus=2")
    assert "--mincpus" in left.said
    assert left.tag(shared) is None
    job = sbatch(shared, "--gpus=1", "--hold", "-c2")
    assert job.tag(shared) is not None
    refused(shared, "scontrol", "update", f"JobId={job.job_id}", "MinCPUsNode=3")


def test_tasks_of_a_gang_that_waits_stay(shared: Testbed) -> None:
    """It has one task a card: with fewer it would hold part of some cards only."""
    job = sbatch(shared, "--gpus=1", "--hold", "--time=10", token=None).job_id
    shared.run(["scontrol", "update", f"JobId={job}", f"AdminComment=GS1:c=2;t={KNOWN};o=shard:2;k=2"])
    for change in ("NumTasks=2", "TasksPerNode=2"):
        refused(shared, "scontrol", "update", f"JobId={job}", change)
    shared.run(["scontrol", "update", f"JobId={job}", "TimeLimit=5", "Nice=3"], user=USER)
