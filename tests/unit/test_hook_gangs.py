"""What becomes of a job that asks for all GPUs of a node, in each Lua that Slurm may be built with."""

from __future__ import annotations

from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, UNKNOWN, LuaHook, make_hook

from slurm_gpushare.protocol.tag import parse_tag

SHARED = {"comment": f"gpushare:{KNOWN}"}
Desc = dict[str, str | int]


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    """A site of nodes with four GPUs whose helper lets gangs share, and a workload that was measured on four."""
    made = make_hook(request.param, tmp_path)
    made.configure(GpusPerNode="4", ShareGangs="yes")
    made.hook_file.unlink()
    made.write_hook_file(gpus=4, gangs=1)
    return made


GANGS: dict[str, tuple[Desc, dict[str, str]]] = {
    "--gres": (
        {"tres_per_node": "gres/gpu:4"},
        {"cpus_per_task": "1", "min_cpus": "4", "environment.GPUSHARE_GANG": "4:0:0"},
    ),
    "--gpus": ({"tres_per_job": "gres/gpu:4"}, {"cpus_per_task": "1"}),
    "a task a GPU": (
        {"tres_per_node": "gres/gpu:4", "num_tasks": 4, "cpus_per_task": 8, "max_nodes": 1, "min_nodes": 1},
        {"cpus_per_task": "8", "environment.GPUSHARE_GANG": "4:4:8"},
    ),
    "one task with many CPUs": (
        {"tres_per_node": "gres/gpu:4", "num_tasks": 1, "cpus_per_task": 14},
        {"cpus_per_task": "4", "min_cpus": "16", "environment.GPUSHARE_GANG": "4:1:16"},
    ),
    "more tasks than GPUs": (
        {"tres_per_node": "gres/gpu:4", "ntasks_per_node": 8, "max_nodes": 1},
        {"cpus_per_task": "2", "ntasks_per_node": "4", "environment.GPUSHARE_GANG": "4:8:0"},
    ),
    "CPUs and memory a GPU": (
        {"tres_per_node": "gres/gpu:4", "cpus_per_tres": "gres/gpu:6", "mem_per_tres": "gres/gpu:1000"},
        {"cpus_per_task": "6", "cpus_per_tres": "", "mem_per_tres": "", "min_mem_per_node": "4000"},
    ),
    "memory a CPU": (
        {"tres_per_node": "gres/gpu:4", "cpus_per_task": 6, "min_mem_per_cpu": 100},
        {"cpus_per_task": "2", "min_mem_per_node": "600"},
    ),
    "-c of later releases": (
        {"tres_per_node": "gres/gpu:4", "tres_per_task": "cpu=8", "cpus_per_task": 8},
        {"cpus_per_task": "2"},
    ),
    "as many tasks a core as fit": ({"tres_per_node": "gres/gpu:4", "ntasks_per_core": 65535}, {"cpus_per_task": "1"}),
    "by the model": ({"tres_per_node": "gres/gpu:v100:4"}, {"features": "v100"}),
}


@pytest.mark.parametrize(("desc", "fields"), GANGS.values(), ids=GANGS)
def test_a_gang_becomes_all_shards_of_a_card_for_each_of_as_many_tasks(
    hook: LuaHook, desc: Desc, fields: dict[str, str]
) -> None:
    answer = hook.submit(**SHARED, **desc)
    assert answer.logged == []
    assert (answer.fields["tres_per_task"], answer.fields.get("num_tasks", desc.get("num_tasks"))) in (
        ("gres/shard:2", "4"),
        ("gres/shard:2", 4),
    )
    for name in ("tres_per_node", "tres_per_job"):
        assert answer.fields.get(name, "") == ""
    assert {name: answer.fields.get(name, str(desc.get(name))) for name in fields} == fields
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert (tag.token, tag.original, tag.gang, tag.lease) == (KNOWN, "shard:2", 4, True)
    assert "share its node" in answer.said[0]


LEFT_ALONE: dict[str, tuple[Desc, str]] = {
    "fewer GPUs than the node has": ({"tres_per_node": "gres/gpu:2"}, "more than one GPU"),
    "two nodes": ({"tres_per_node": "gres/gpu:4", "min_nodes": 2, "max_nodes": 2}, "more than one node"),
    "tasks that may spread": ({"tres_per_job": "gres/gpu:4", "num_tasks": 4}, "-N 1"),
    "GPUs bound to tasks": ({"tres_per_task": "gres/gpu:1", "num_tasks": 4, "max_nodes": 1}, "tasks"),
    "tasks by socket": ({"tres_per_node": "gres/gpu:4", "ntasks_per_socket": 1}, "binds tasks"),
    "--gpu-bind": ({"tres_per_node": "gres/gpu:4", "tres_bind": "gres/gpu:closest"}, "binds tasks"),
    "--exclusive": ({"tres_per_node": "gres/gpu:4", "shared": 0}, "whole node"),
    "a NIC as well": ({"tres_per_node": "gres/gpu:4,gres/nic:1"}, "several kinds"),
    "a list of nodes": ({"tres_per_node": "gres/gpu:4", "req_nodes": "gpu[0-1]"}, "more than one node"),
}


@pytest.mark.parametrize(("desc", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_not_a_plain_gang_runs_as_written(hook: LuaHook, desc: Desc, reason: str) -> None:
    answer = hook.submit(**SHARED, **desc)
    assert answer.untouched
    assert reason in answer.said[0]


FOUR: Desc = {"tres_per_node": "gres/gpu:4"}


def test_a_gang_of_an_unknown_workload_is_measured_on_whole_cards(hook: LuaHook) -> None:
    """Written as it will be when it shares: of a job with whole GPUs a prolog is told only the last one."""
    answer = hook.submit(comment=f"gpushare:{UNKNOWN}", **FOUR)
    assert (answer.fields["tres_per_task"], answer.fields["num_tasks"]) == ("gres/shard:2", "4")
    assert answer.fields["admin_comment"] == f"GS1:probe;t={UNKNOWN};k=4"
    assert "begin_time" not in answer.fields
    assert "measured" in answer.said[0]


@pytest.mark.parametrize("token", [KNOWN, UNKNOWN])
def test_without_a_helper_a_gang_runs_as_written(hook: LuaHook, token: str) -> None:
    hook.hook_file.unlink()
    hook.write_hook_file(gpus=4, gangs=1, heartbeat_age_s=3600)
    answer = hook.submit(comment=f"gpushare:{token}", **FOUR)
    assert answer.untouched
    assert "not running" in answer.said[0]


def test_a_workload_on_another_number_of_gpus_is_measured_anew(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, tres_per_node="gres/gpu:1")
    assert answer.fields["admin_comment"] == f"GS1:probe;t={KNOWN};o=gpu:1"


@pytest.mark.parametrize(
    "keys",
    [
        {"ShareGangs": "no"},
        {"Policy": "shadow"},
        {"SlurmVersion": "22.05.8"},
        {"GpusPerNode": "8"},
        {"GpusPerNode": "1"},
    ],
    ids=["not wanted", "only worked out", "an old release", "a part of a wider node", "single GPUs"],
)
def test_without_what_gangs_need_the_job_runs_as_written(hook: LuaHook, keys: dict[str, str]) -> None:
    hook.configure(**{"GpusPerNode": "4", "ShareGangs": "yes", **keys})
    answer = hook.submit(**SHARED, **FOUR)
    assert answer.untouched


def test_a_slurm_that_is_not_set_up_for_gangs_gets_none(hook: LuaHook) -> None:
    """The helper has asked Slurm, and says so in the hook's file."""
    hook.hook_file.unlink()
    hook.write_hook_file(gpus=4, gangs=0)
    answer = hook.submit(**SHARED, **FOUR)
    assert answer.untouched
    assert "not set up" in answer.said[0]


def test_a_field_that_cannot_be_written_leaves_the_whole_job_as_it_was(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, **FOUR, fail_on="num_tasks")
    assert {name: value for name, value in answer.fields.items() if not name.startswith("environment.")} == {}
    assert answer.logged
