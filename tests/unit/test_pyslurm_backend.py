"""The optional backend, as far as it can be tried without the library, which fits one Slurm release only."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import connect
from slurm_gpushare.slurm.pyslurm_backend import translate, why_not
from slurm_gpushare.slurm.release import Release


def pyslurm_job(**changes: Any) -> SimpleNamespace:
    """An object with the attributes that pyslurm 25.11 gives a job."""
    names = (
        "array_id array_task_id array_tasks_waiting heterogeneous_id heterogeneous_offset account qos reservation "
        "state_reason eligible_time start_time end_time time_limit allocated_nodes required_nodes excluded_nodes "
        "constraints dependencies requeue_count memory tres_per_job tres_per_node tres_per_socket tres_per_task "
        "cpus_per_gpu memory_per_gpu admin_comment comment resource_sharing priority nice submit_time"
    )
    values = dict.fromkeys(names.split()) | {
        "id": 14, "user_id": 1000, "partition": "gpu", "state": "PENDING", "num_nodes": 1, "cpus": 2,
        "is_requeueable": True,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def tres(**counts: int) -> SimpleNamespace:
    gres = {name.replace("__", ":"): SimpleNamespace(count=count) for name, count in counts.items()}
    return SimpleNamespace(gres=gres)


def test_a_job_reads_as_from_squeue() -> None:
    tag = "GS1:c=1;t=gs-aaaaaaaaaaaaaaaaaaaa;o=gpu:1"
    (job,) = translate(pyslurm_job(admin_comment=tag, tres_per_node=tres(shard__v100_1=1), time_limit=60))
    assert (job.key, job.raw_id, job.limit_s) == ("14", 14, 3600)
    assert job.shard is not None
    assert job.shard.type == "v100_1"
    assert job.tag is not None
    assert job.tag.cluster == 1


def test_waiting_tasks_of_an_array_come_one_by_one() -> None:
    tasks = list(translate(pyslurm_job(id=6, array_id=6, array_tasks_waiting="1-2,7")))
    assert [task.key for task in tasks] == ["6_1", "6_2", "6_7"]


@pytest.mark.parametrize(
    ("version", "release", "reason"),
    [
        (None, Release(24, 11, 5), "not installed"),
        ("25.11.2", Release(24, 11, 5), "made for Slurm 25.11"),
        ("unknown", Release(24, 11, 5), "does not say"),
        ("25.11.2", Release(25, 11, 0), None),
    ],
)
def test_it_is_used_only_where_it_fits(
    version: str | None, release: Release, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = None
    if version is not None:
        module = ModuleType("pyslurm")
        module.__version__ = version
    monkeypatch.setitem(sys.modules, "pyslurm", module)
    answer = why_not(release)
    assert answer is None if reason is None else reason in (answer or "")


def test_asking_for_it_where_it_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    monkeypatch.setattr("slurm_gpushare.slurm.commands.CommandSlurm.release", Release(24, 11, 5))
    with pytest.raises(SlurmError, match="pyslurm cannot be used"):
        connect("pyslurm")
    assert connect("auto").name == "commands"
