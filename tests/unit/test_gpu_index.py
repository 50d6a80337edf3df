"""Where the hook had to choose a GPU's type, the plan keeps to it."""

from __future__ import annotations

from world import TOKEN_A, job

from slurm_gpushare.helper.observe import _own_type
from slurm_gpushare.helper.places import Sites
from slurm_gpushare.helper.snapshot import Gpu, NodeRoom, PendingJob, Snapshot, Workload

OURS = Workload(TOKEN_A)


def test_type_comes_from_the_typed_original_request() -> None:
    assert _own_type(job(tag=f"GS1:c=1;t={TOKEN_A};o=shard:v100_1:2")) == "v100_1"
    for original in ("gpu:1", "shard:2"):
        assert _own_type(job(tag=f"GS1:c=1;t={TOKEN_A};o={original}")) is None
    assert _own_type(job()) is None


def test_job_with_an_index_is_allowed_on_no_other() -> None:
    gpus = tuple(Gpu(node, index, "v100", 16_000) for node in ("n0", "n1") for index in (0, 1))
    nodes = {name: NodeRoom(name, cpus_free=8, mem_free_mib=8_000) for name in ("n0", "n1")}
    sites = Sites(Snapshot(now_s=0.0, gpus=gpus, nodes=nodes, pending=()))
    assert sites.allowed(PendingJob("1", OURS, gpu_index=1)).tolist() == [False, True, False, True]
    assert sites.allowed(PendingJob("2", OURS)).tolist() == [True] * 4
    assert sites.allowed(PendingJob("3", OURS, gpu_model="a100")).tolist() == [False] * 4
