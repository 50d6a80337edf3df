"""``cpus=auto`` in a comment: the hook asks for as many CPUs as the workload's curve says."""

from __future__ import annotations

from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, UNKNOWN, LuaHook, make_hook

AUTO = {"comment": f"gpushare:{KNOWN},cpus=auto", "tres_per_node": "gres/gpu:1"}
ONE_NODE = {"min_nodes": 1, "max_nodes": 1}
MEM = {"min_mem_per_node": 4000}


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    hook = make_hook(request.param, tmp_path)
    knows(hook, 4)
    return hook


def knows(hook: LuaHook, cpus: int | None) -> None:
    hook.hook_file.unlink(missing_ok=True)
    hook.write_hook_file(cpus=cpus)


def test_job_asks_for_the_cpus_of_its_curve(hook: LuaHook) -> None:
    answer = hook.submit(**AUTO, cpus_per_task=2, pn_min_cpus=2, min_cpus=2)
    assert (answer.code, answer.logged) == (0, [])
    assert [answer.fields[name] for name in ("cpus_per_task", "min_cpus", "pn_min_cpus")] == ["4", "4", "4"]
    assert answer.said[1:] == ["gpushare: cpus=auto: 4 CPUs instead of 2, as measured for this workload."]
    assert "GS1:c=2" in answer.fields["admin_comment"]


def test_job_without_the_word_keeps_its_cpus(hook: LuaHook) -> None:
    answer = hook.submit(**{**AUTO, "comment": f"gpushare:{KNOWN}"}, cpus_per_task=2)
    assert "cpus_per_task" not in answer.fields
    assert len(answer.said) == 1


def test_cpus_are_those_of_all_tasks(hook: LuaHook) -> None:
    three = {"comment": AUTO["comment"], "tres_per_job": "gres/gpu:1", "num_tasks": 3}
    answer = hook.submit(**three, min_cpus=3)
    assert (answer.fields["cpus_per_task"], answer.fields["min_cpus"]) == ("2", "6")


def test_cpus_asked_for_each_gpu_stay_since_srun_repeats_them(hook: LuaHook) -> None:
    answer = hook.submit(**AUTO, **MEM, cpus_per_tres="gres/gpu:16")
    assert (answer.fields["cpus_per_task"], answer.fields["cpus_per_tres"]) == ("16", "")
    assert "so the CPUs stay as written" in answer.said[1]


def test_cpus_replace_the_default_of_the_partition(hook: LuaHook) -> None:
    hook.configure(DefCpuPerGpu="gpu:16")
    answer = hook.submit(**AUTO, **MEM)
    assert (answer.fields["cpus_per_task"], answer.fields["min_cpus"]) == ("4", "4")
    assert "4 CPUs instead of 16" in answer.said[1]


def test_cpus_beside_gpus_for_each_task_stay_since_srun_repeats_both(hook: LuaHook) -> None:
    asked = {"tres_per_task": "cpu=2,gres/gpu=1", "num_tasks": 1}
    answer = hook.submit(comment=AUTO["comment"], **asked, cpus_per_task=2)
    assert answer.fields["tres_per_task"] == "cpu=2"
    assert "so the CPUs stay as written" in answer.said[1]


@pytest.mark.parametrize("written", ["cpu=2", "cpu:2"])
def test_what_sbatch_repeats_of_c_follows(hook: LuaHook, written: str) -> None:
    answer = hook.submit(**AUTO, tres_per_task=written, num_tasks=1, cpus_per_task=2)
    assert answer.fields["tres_per_task"] == ("cpu:4" if ":" in written else "cpu=4")


def test_memory_for_each_cpu_stays_what_it_was_in_all(hook: LuaHook) -> None:
    answer = hook.submit(**AUTO, cpus_per_task=8, min_cpus=8, pn_min_cpus=8, min_mem_per_cpu=1000)
    assert (answer.fields["cpus_per_task"], answer.fields["min_mem_per_node"]) == ("4", "8000")


def test_cpus_stay_where_fewer_might_mean_less_memory(hook: LuaHook) -> None:
    answer = hook.submit(**AUTO, cpus_per_task=8, min_cpus=8)
    assert "cpus_per_task" not in answer.fields
    assert "8 stay as written. Say how much it needs with --mem" in answer.said[1]
    assert hook.submit(**AUTO, **MEM, cpus_per_task=8, min_cpus=8).fields["cpus_per_task"] == "4"


def test_job_with_a_mincpus_of_its_own_is_left_alone(hook: LuaHook) -> None:
    """The helper counts what its tasks have, and would send it where it cannot start."""
    one = {"partition": "gpu", "tres_per_node": "gres/gpu:1", "comment": f"gpushare:{KNOWN}"}
    alone = hook.submit(**one, pn_min_cpus=16)
    assert "admin_comment" not in alone.fields
    assert "--mincpus" in alone.said[0]
    assert "admin_comment" in hook.submit(**one, cpus_per_task=16, pn_min_cpus=16).fields
    assert "admin_comment" in hook.submit(**one, **ONE_NODE, num_tasks=4, cpus_per_task=2, pn_min_cpus=8).fields


def test_an_explicit_mincpus_stays(hook: LuaHook) -> None:
    assert "pn_min_cpus" not in hook.submit(**AUTO, **ONE_NODE, num_tasks=8, cpus_per_task=2, pn_min_cpus=16).fields


def test_partition_allows_no_more(hook: LuaHook) -> None:
    knows(hook, 40)
    most = {"gpu": 32, "gpu2": 6, "gpu,gpu2": 6}  # 98 CPUs on three nodes; MaxCPUsPerNode=6
    for partition, cpus in most.items():
        answer = hook.submit(**AUTO, partition=partition)
        assert answer.fields["cpus_per_task"] == str(cpus)
        assert (
            f"{cpus} CPUs instead of 1: 40 were measured to be enough, but the partition allows no more"
            in answer.said[1]
        )


@pytest.mark.parametrize("token", [KNOWN, UNKNOWN])
def test_where_nothing_is_known_the_request_stays(hook: LuaHook, token: str) -> None:
    """A workload that nobody has measured on several numbers of CPUs, or at all."""
    knows(hook, None)
    answer = hook.submit(comment=f"gpushare:{token},cpus=auto", tres_per_node="gres/gpu:1", cpus_per_task=2)
    assert "cpus_per_task" not in answer.fields
    assert "not known, so they stay as written" in answer.said[1]
    assert len(answer.said) == 2


def test_cpus_as_written_are_said_to_fit(hook: LuaHook) -> None:
    answer = hook.submit(**AUTO, cpus_per_task=4)
    assert "cpus_per_task" not in answer.fields
    assert "4 CPUs, as written" in answer.said[1]


@pytest.mark.parametrize("why", ["two GPUs", "away", "shadow"])
def test_job_that_does_not_take_part_runs_as_written(hook: LuaHook, why: str) -> None:
    if why == "away":
        hook.hook_file.unlink()
        hook.write_hook_file(heartbeat_age_s=3600, cpus=4)
    elif why == "shadow":
        hook.configure(Policy="shadow")
    gpus = "gres/gpu:2" if why == "two GPUs" else "gres/gpu:1"
    answer = hook.submit(**{**AUTO, "tres_per_node": gpus}, cpus_per_task=2)
    assert "cpus_per_task" not in answer.fields
    assert len(answer.said) == 1
    assert "as written" in answer.said[0]
