"""Where the hook had to choose a GPU index, the plan keeps to it."""

from __future__ import annotations

from slurm_things import NEW, TOKEN_A, job

from slurm_gpushare.coschedule.constraints import Sites
from slurm_gpushare.coschedule.observe import _own_index
from slurm_gpushare.coschedule.snapshot import Gpu, Node, PendingJob, Snapshot


def test_index_comes_from_the_typed_original_request() -> None:
    assert _own_index(job(tag=f"GS1:c=1;t={TOKEN_A};o=shard:v100_1:2")) == 1
    for original in ("gpu:1", "shard:2"):
        assert _own_index(job(tag=f"GS1:c=1;t={TOKEN_A};o={original}")) is None
    assert _own_index(job()) is None
    assert NEW.gpu_becomes_shard


def test_job_with_an_index_is_allowed_on_no_other() -> None:
    gpus = tuple(Gpu(node, index, "v100", 16_000) for node in ("n0", "n1") for index in (0, 1))
    nodes = {name: Node(name, cpus_free=8, mem_free_mib=8_000) for name in ("n0", "n1")}
    sites = Sites(Snapshot(now_s=0.0, gpus=gpus, nodes=nodes, pending=()))
    assert sites.allowed(PendingJob("1", TOKEN_A, gpu_index=1)).tolist() == [False, True, False, True]
    assert sites.allowed(PendingJob("2", TOKEN_A)).tolist() == [True] * 4
