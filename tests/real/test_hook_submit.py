"""The hook inside slurmctld: every way to ask for a GPU, on the release under test."""

from __future__ import annotations

import time

import pytest
from gpushare_lab.experiment.submitting import show, wait_for
from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import (
    KNOWN,
    OTHERS,
    UNKNOWN,
    hook_log,
    is_old,
    node_features,
    place,
    prefix,
    refused,
    sbatch,
    set_conf,
    write_hook_file,
)

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.tag import parse_tag

REQUEST = ("TresPerJob", "TresPerNode", "TresPerSocket", "TresPerTask", "CpusPerTres", "MemPerTres", "TresBind")


@pytest.fixture
def shared(testbed: Testbed) -> Testbed:
    write_hook_file(testbed)
    return testbed


def request(testbed: Testbed, job_id: int | str) -> dict[str, str]:
    job = show(testbed, job_id)
    return {name: job[name] for name in REQUEST if name in job}


ONE_GPU = [
    "--gpus=1",
    "--gpus=v100:1",
    "--gres=gpu:1",
    "--gres=gpu",
    "--gres=gpu:v100:1",
    "--gpus-per-node=1",
    "--gpus-per-node=v100:1",
    "--gpus-per-task=1 -n1",
    "--gpus-per-task=v100:1 -n1 -c4",
    "--gpus-per-socket=1 --sockets-per-node=1",
    "--ntasks-per-gpu=2 -n2",
    "--ntasks-per-gpu=2 --gpus=1",
    "--gpus=1 -n4",
    "--gpus=1 -c4",
    "--gpus=1 --cpus-per-gpu=4",
    "--gpus=1 --mem-per-gpu=4G",
    "--gpus=1 --mem=5G --no-requeue --time=10 --nice=5",
    "--gres=gpu:1 -N1 -n3",
    "--gres=gpu:1 -w gpu1 --exclude=gpu0",
    "--gres=gpu:1 --constraint=v100",
]


@pytest.mark.parametrize("options", ONE_GPU)
def test_one_gpu_asked_for_in_any_way_can_be_placed_on_a_chosen_card(shared: Testbed, options: str) -> None:
    job = sbatch(shared, *options.split(), script="echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > ~/where")
    tag = job.tag(shared)
    assert tag is not None, job.said
    assert (tag.cluster, tag.token, tag.lease) == (2, KNOWN, True)
    assert job.said.count("gpushare: ") == 1
    asked = {name: value for name, value in request(shared, job.job_id).items() if not value.startswith("cpu")}
    assert asked == {"TresPerNode": f"{prefix(shared)}{tag.original}"}
    assert (tag.original == "gpu:1") != is_old(shared)
    assert tag.nodes == ("gpu1" if "-w" in options else None)
    index = place(shared, job.job_id, index=1, node="gpu1")
    wait_for(shared, job.job_id, ["COMPLETED"])
    assert (shared.layout.home / "games" / "where").read_text() == f"gpu1 {index}\n"


LEFT_ALONE = [
    ("--gpus=2", "more than one GPU"),
    ("--gres=gpu:v100_1:1", "names one GPU"),
    ("--gres=gpu:1 -N2", "more than one node"),
    ("--gres=gpu:1 -n2", "-N 1"),
    ("--gpus-per-task=1 -n2", "several tasks"),
    ("--gres=gpu:1 --exclusive", "whole node"),
    ("--gpus=1 --gpu-bind=closest", "--gpu-bind"),
    ("--gpus=1 --gpu-freq=low", "--gpu-freq"),
    ("--gpus=1 -M testbed", "other clusters"),
    ("--gpus=1 -p other", "partitions"),
    ("--gpus=1 -p gpu,other", "partitions"),
    ("-n1", "no GPU"),
]


@pytest.mark.parametrize(("options", "why"), LEFT_ALONE)
def test_what_cannot_share_runs_as_written_and_says_why(shared: Testbed, options: str, why: str) -> None:
    job = sbatch(shared, *options.split())
    assert job.said.count("gpushare: ") == 1
    assert why in job.said
    assert job.tag(shared) is None
    if not is_old(shared):
        plain = sbatch(shared, *options.split(), token=None)
        assert request(shared, job.job_id) == request(shared, plain.job_id)
    wait_for(shared, job.job_id, ["COMPLETED"])


def whole(testbed: Testbed) -> dict[str, str]:
    return {"TresPerNode": "gres:shard:2"} if is_old(testbed) else {"TresPerJob": "gres/gpu:1"}


def test_an_unknown_token_is_probed_on_a_whole_gpu(shared: Testbed) -> None:
    job = sbatch(shared, "--gpus=1", token=UNKNOWN)
    may_wait = "" if is_old(shared) else ";o=gpu:1"
    assert show(shared, job.job_id)["AdminComment"] == f"GS1:probe;t={UNKNOWN}{may_wait}"
    assert request(shared, job.job_id) == (whole(shared) if is_old(shared) else {"TresPerNode": "gres/gpu:1"})
    wait_for(shared, job.job_id, ["COMPLETED"])


def test_a_job_with_somebody_elses_token_runs_as_written_and_its_owner_is_told(shared: Testbed) -> None:
    job = sbatch(shared, "--gpus=1", token=OTHERS)
    assert "its token is another user's. Make one of your own" in job.said
    assert "AdminComment" not in show(shared, job.job_id)
    assert request(shared, job.job_id) == whole(shared)
    wait_for(shared, job.job_id, ["COMPLETED"])


def test_job_without_a_token_keeps_its_request(shared: Testbed) -> None:
    job = sbatch(shared, "--gpus=1", token=None)
    assert request(shared, job.job_id) == whole(shared)
    assert "AdminComment" not in show(shared, job.job_id)
    assert job.said == ""
    wait_for(shared, job.job_id, ["COMPLETED"])


def test_if_nobody_places_it_the_job_starts_on_a_whole_gpu_after_its_lease(shared: Testbed) -> None:
    set_conf(shared, LeaseSeconds="2")
    before = int(time.time())  # leases begin with the second
    job = sbatch(shared, "--gpus=1", script="env > ~/environment")
    wait_for(shared, job.job_id, ["COMPLETED"])
    assert time.time() >= before + 2
    assert "CUDA_VISIBLE_DEVICES=" in (shared.layout.home / "games" / "environment").read_text()


def test_salloc_and_srun_are_left_alone(shared: Testbed) -> None:
    for command in (["salloc", "--gpus=1"], ["srun", "--gres=gpu:1"]):
        done = shared.run([*command, f"--comment=gpushare:{KNOWN}", "sh", "-c", "echo ran"], user="games")
        assert done.stdout == "ran\n"
        assert "only sbatch jobs share" in done.stderr
    done = shared.run(
        ["srun", "--immediate=60", "--gpus=1", f"--comment=gpushare:{KNOWN}", "echo", "ran"], user="games"
    )
    assert done.stdout == "ran\n"
    assert "not shared" in done.stderr


def test_array_tasks_are_all_tagged_and_placed_one_by_one(shared: Testbed) -> None:
    job = sbatch(shared, "--array=0-2%2", "--gpus=1")
    place(shared, f"{job.job_id}_1", index=1, node="gpu0")
    for task in (0, 1, 2):
        tag = parse_tag(show(shared, f"{job.job_id}_{task}")["AdminComment"])
        assert tag is not None
        assert tag.token == KNOWN
    assert show(shared, f"{job.job_id}_1")["ReqNodeList"] == "gpu0"
    assert show(shared, f"{job.job_id}_2")["ReqNodeList"] == "(null)"


def test_heterogeneous_job_is_left_alone(shared: Testbed) -> None:
    done = shared.run(
        ["sbatch", "--parsable", "--output=/dev/null", f"--comment=gpushare:{KNOWN}", "--gpus=1", ":", "--gpus=v100:1"],
        user="games",
        input="#!/bin/sh\ntrue\n",
        cwd=shared.layout.home,
    )
    job_id = int(done.stdout.split(";")[0])
    assert "heterogeneous" in done.stderr
    wait_for(shared, job_id, ["COMPLETED"])


def test_begin_dependency_reservation_and_hold(shared: Testbed) -> None:
    later = sbatch(shared, "--gpus=1", "--begin=now+1hour")
    tag = later.tag(shared)
    assert tag is not None
    assert not tag.lease
    started = time.mktime(time.strptime(show(shared, later.job_id)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    assert started > time.time() + 3500

    after = sbatch(shared, "--gpus=1", f"--dependency=afterany:{later.job_id}")
    assert after.tag(shared) is not None
    assert show(shared, after.job_id)["Dependency"].startswith("afterany")

    held = sbatch(shared, "--gpus=1", "--hold")
    assert held.tag(shared) is not None
    assert show(shared, held.job_id)["Priority"] == "0"

    reservation = "ReservationName=r Users=games Nodes=gpu0 StartTime=now Duration=10"
    shared.run(["scontrol", "create", "reservation", *reservation.split()])
    try:
        job = sbatch(shared, "--gpus=1", "--reservation=r")
        assert job.tag(shared) is not None
        place(shared, job.job_id, index=0, node="gpu0")
        wait_for(shared, job.job_id, ["COMPLETED"])
    finally:
        shared.run(["scontrol", "delete", "ReservationName=r"])


def test_admin_comment_of_the_sites_own_script_is_kept(shared: Testbed) -> None:
    """No user can set one: it comes from lines of the site's before ours."""
    script = shared.layout.etc / "job_submit.lua"
    bridge = resource_dir("lua_bridge") / "job_submit.lua"
    script.write_text(
        f'dofile("{bridge}")\n'
        "local ours = slurm_job_submit\n"
        "function slurm_job_submit(job, ...) job.admin_comment = 'ticket 5' return ours(job, ...) end\n"
        "return slurm.SUCCESS\n"
    )
    shared.restart("slurmctld")
    job = sbatch(shared, "--gpus=1", token=UNKNOWN)
    assert show(shared, job.job_id)["AdminComment"].startswith(f"ticket 5 GS1:probe;t={UNKNOWN}")


def test_gpus_by_model_run_although_types_are_per_index(shared: Testbed) -> None:
    with node_features(shared, gpu0="v100,rack1", gpu1="v100,rack2"):
        for constraint, node in ((None, None), ("rack2", "gpu1"), ("rack1|rack2", None), ("[rack1|rack2]", None)):
            options = [f"--constraint={constraint}"] if constraint else []
            job = sbatch(shared, "--gres=gpu:v100:2", "-N1", *options, token=None)
            assert "v100" in show(shared, job.job_id)["Features"]
            wait_for(shared, job.job_id, ["COMPLETED"])
            assert node is None or show(shared, job.job_id)["NodeList"] == node


def test_raw_shards_are_refused_to_users_and_given_to_root(shared: Testbed) -> None:
    error = refused(shared, "sbatch", "--gres=shard:1")
    assert "shards are given out by gpushare" in error
    assert "shards are given out by gpushare" in refused(shared, "srun", "--gres=shard:v100_0:1", "true")
    assert "shards are given out by gpushare" in refused(shared, "sbatch", "--gres=shard:1", "-p", "other")
    set_conf(shared, RawShards="allow")
    wait_for(shared, sbatch(shared, "--gres=shard:1", token=None).job_id, ["COMPLETED"])


def test_users_cannot_change_what_the_helper_decides(shared: Testbed) -> None:
    job = sbatch(shared, "--gpus=1", "--begin=now+1hour")
    plain = sbatch(shared, "--gpus=1", "--begin=now+1hour", token=None)
    before = show(shared, job.job_id)
    for change in ("Gres=shard:v100_0:1", "Gres=gpu:1", "ReqNodeList=gpu1", "AdminComment=GS1:c=0"):
        refused(shared, "scontrol", "update", f"JobId={job.job_id}", change)
    for change in ("Gres=shard:1", "AdminComment=GS1:c=0"):
        refused(shared, "scontrol", "update", f"JobId={plain.job_id}", change)
    after = show(shared, job.job_id)
    assert {name: after.get(name) for name in (*REQUEST, "AdminComment", "ReqNodeList")} == {
        name: before.get(name) for name in (*REQUEST, "AdminComment", "ReqNodeList")
    }
    for change in (["hold"], ["release"]):
        shared.run(["scontrol", *change, str(job.job_id)], user="games")
    shared.run(["scontrol", "update", f"JobId={job.job_id}", "TimeLimit=5"], user="games")
    place(shared, job.job_id, index=0, node="gpu0")
    wait_for(shared, job.job_id, ["COMPLETED"])


@pytest.fixture(scope="module", autouse=True)
def lines_before(testbed_session: Testbed) -> int:
    """Lines of the hook in the log before this file's tests: other files break things on purpose."""
    return len(hook_log(testbed_session))


def test_no_fault_of_the_hook_is_in_the_log(shared: Testbed, lines_before: int) -> None:
    """Runs last in this file: whatever the tests above did, the hook did not stumble."""
    assert [line for line in hook_log(shared)[lines_before:] if "error" in line] == []
