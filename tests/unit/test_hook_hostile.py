"""What an ordinary user may send to stall slurmctld, or to get at other people's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, OTHERS, ROOT, USER, LuaHook, literal, make_hook

DENIED = 2002
TAGGED = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=gpu:1;l=1"}
PLAIN = {"partition": "gpu"}
SHARED = {"comment": f"gpushare:{KNOWN}"}


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


@pytest.mark.parametrize("field", ["tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"])
def test_long_request_for_gpus_is_refused_with_one_line(hook: LuaHook, field: str) -> None:
    for word in ("gpu", "GPU", "shard", "Shard"):
        text = "gres/nic:1," * 100 + f"gres/{word}:1"
        for answer in (hook.submit(**{field: text}), hook.modify(PLAIN, **{field: text})):
            assert (answer.code, answer.fields, answer.logged) == (DENIED, {}, [])
        assert len(hook.submit(**{field: text}).said) == 1
    assert hook.submit(**{field: "gres/nic:1," * 100}).untouched


@pytest.mark.parametrize(
    "long",
    [
        {"features": "(" * 120_000},
        {"partition": "gpu," * 600},
        {"req_nodes": "gpu0," * 600},
        {"clusters": "x" * 2000},
        {"tres_bind": "gres/gpu:" + "x" * 2000},
        {"cpus_per_tres": "gres/gpu:1," * 200},
        {"comment": f"gpushare:{KNOWN} " + "x" * 2000},
        {"tres_per_job": "gres/nic:1," * 200},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_long_field_rules_out_sharing_while_the_model_is_still_rewritten(
    hook: LuaHook, long: dict[str, str]
) -> None:
    answer = hook.submit(**{**SHARED, "tres_per_node": "gres/gpu:v100:1", **long})
    assert answer.code == 0
    assert answer.fields["tres_per_node"] == "gres/gpu:1"
    assert answer.fields["features"].endswith("v100")
    assert "admin_comment" not in answer.fields
    assert len(answer.said) == 1


@pytest.mark.parametrize(
    "request_text",
    [
        "xgres:shard:v100_0:1",
        "xgres/shard:1",
        "gresshard:1",
        "gres/nic:1,agres:shard:1",
        "GRES:shard:1",
        "Shard:1",
        "gres/x:shard:1",
        "gres:shard:v100_0:1:1",
    ],
)
def test_shards_in_disguise_are_refused(hook: LuaHook, request_text: str) -> None:
    """Slurm looks for "gres" anywhere in the text."""
    for field in ("tres_per_node", "tres_per_job"):
        assert hook.submit(**{field: request_text}).code == DENIED
        assert hook.modify(PLAIN, **{field: request_text}).code == DENIED


@pytest.mark.parametrize("request_text", ["GRES:gpu:2", "xgres/gpu:1", "GPU:1", "gres/gpu:1k", "gres/gpu:v100:1:1"])
def test_change_of_gpus_that_is_not_understood_is_refused(hook: LuaHook, request_text: str) -> None:
    for record in (PLAIN, TAGGED):
        refused = hook.modify(record, tres_per_node=request_text)
        assert (refused.code, refused.fields, len(refused.said)) == (DENIED, {}, 1)
    assert hook.modify({"partition": "other"}, tres_per_node=request_text).untouched
    assert hook.modify(PLAIN, tres_per_node=request_text, uid=0).untouched


@pytest.mark.parametrize("request_text", ["gres/gpu:2", "gres/gpu:a100:1", "gres/gpu=1", "gres/vgpu:1", "gres/nic:1"])
def test_change_that_is_understood_passes(hook: LuaHook, request_text: str) -> None:
    assert hook.modify(PLAIN, tres_per_node=request_text).untouched


def fetched(hook: LuaHook, **desc: str) -> list[str]:
    """The fields that slurmctld was asked for, in order."""
    lua = f"slurm_job_submit(run.descriptor({literal(desc)}, true), run.partitions, {USER})"
    return hook.chunk(lua + "\nprint(table.concat(run.fetched, ' '))").split()


def test_job_that_says_nothing_of_gpus_is_hardly_looked_at(hook: LuaHook) -> None:
    """Slurm goes through a list of names for each field, and most jobs of most sites have no GPU."""
    quick = ["comment", "ntasks_per_tres", "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"]
    for desc in ({}, {"comment": "my own words"}, {"tres_per_node": "gres/nic:1"}):
        assert sorted(fetched(hook, **desc)) == quick


def test_each_field_is_fetched_once_to_decide_and_once_to_be_put_back(hook: LuaHook) -> None:
    seen = fetched(hook, comment=f"gpushare:{KNOWN}", tres_per_node="gres/gpu:1")
    written = {"tres_per_node", "begin_time", "admin_comment"}  # `apply` keeps what was there
    assert {name for name in seen if seen.count(name) > 1} <= written
    assert max(seen.count(name) for name in seen) <= 2


def test_request_of_a_shared_job_cannot_be_emptied(hook: LuaHook) -> None:
    for field in ("tres_per_node", "tres_per_job", "req_nodes"):
        assert hook.modify(TAGGED, **{field: ""}).code == DENIED


def test_shards_are_refused_on_every_partition_with_nodes_that_share(hook: LuaHook) -> None:
    """`twin` is not in gpushare.conf, but has one node of a partition that is."""
    for partition in ("twin", "other,twin", "x" * 2000):
        assert hook.submit(tres_per_node="gres/shard:1", partition=partition).code == DENIED
    assert hook.modify({"partition": "twin"}, tres_per_node="gres/shard:1").code == DENIED
    assert hook.submit(tres_per_node="gres/shard:1", partition="other").untouched


def test_model_is_rewritten_on_every_partition_with_nodes_that_share(hook: LuaHook) -> None:
    for partition in ("twin", "gpu,other"):
        answer = hook.submit(tres_per_node="gres/gpu:v100:1", partition=partition)
        assert answer.fields == {"tres_per_node": "gres/gpu:1", "features": "v100"}
        assert answer.said == []
    assert hook.submit(tres_per_node="gres/gpu:v100:1", partition="other").untouched
    answer = hook.modify({"partition": "twin"}, tres_per_node="gres/gpu:v100:1")
    assert answer.fields == {"tres_per_node": "gres/gpu:1", "features": "v100"}


def test_job_with_part_of_a_card_cannot_be_moved_to_nodes_that_share(hook: LuaHook) -> None:
    for request_text in ("gres/shard:1", "xgres/shard:2", "gres:shard:v100_0:1"):
        for field in ("tres_per_node", "tres_per_job"):
            record = {"partition": "other", field: request_text}
            for partition in ("gpu", "twin", "other,gpu"):
                assert hook.modify(record, partition=partition).code == DENIED
            assert hook.modify(record, partition="other").untouched
            assert hook.modify(record, partition="gpu", uid=0).untouched
    for request_text in ("gres/gpu:1", "gres/shard:2"):  # whole cards, as this hook writes them too
        assert hook.modify({"partition": "other", "tres_per_node": request_text}, partition="gpu").untouched
    hook.configure(RawShards="allow")
    assert hook.modify({"partition": "other", "tres_per_node": "gres/shard:1"}, partition="gpu").untouched


@pytest.mark.parametrize("tasks", [254, 65534])
def test_number_that_is_unset_in_a_narrower_field_is_a_number(hook: LuaHook, tasks: int) -> None:
    answer = hook.submit(**SHARED, tres_per_task="gres/gpu:1", num_tasks=tasks)
    assert answer.untouched
    assert "several tasks" in answer.said[0]
    assert hook.submit(**SHARED, tres_per_node="gres/gpu:1", min_nodes=tasks).untouched
    assert hook.submit(**SHARED, tres_per_node="gres/gpu:1", het_job_offset=tasks).untouched
    if tasks == 254:
        assert hook.submit(**SHARED, tres_per_node="gres/gpu:1", ntasks_per_node=tasks).untouched


def test_user_65534_may_share(hook: LuaHook) -> None:
    tokens = hook.directory / "nobody.sqlite"
    hook.write_hook_file(tokens, uid=65534)
    hook.configure(HookFile=str(tokens))
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1", user_id=65534)
    assert "GS1:c=2" in answer.fields["admin_comment"]


def test_hostile_input_costs_bounded_time_and_memory(hook: LuaHook) -> None:
    tokens = literal({"known": KNOWN, "others": OTHERS})
    fuzz = ROOT / "tests/unit/hook_hostile.lua"
    assert hook.chunk(f'dofile("{fuzz}")(run, {tokens})') == "done\n"
