"""Who may change what of a job that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, LuaHook, make_hook

DENIED = 2002
TAGGED = {"partition": "gpu", "admin_comment": f"note GS1:c=2;t={KNOWN};o=gpu:1;l=1"}
PROBED = {"partition": "gpu", "admin_comment": f"GS1:probe;t={KNOWN}"}
PLAIN = {"partition": "gpu"}


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"tres_per_node": "gres/shard:v100_1:1"},
        {"tres_per_node": "gres/gpu:1"},
        {"tres_per_job": "gres/gpu:1"},
        {"req_nodes": "gpu1"},
        {"min_nodes": 2, "max_nodes": 2},
    ],
)
def test_user_cannot_move_a_shared_job_to_another_gpu(hook: LuaHook, change: dict[str, str | int]) -> None:
    assert hook.modify(TAGGED, **change).code == DENIED
    hook.configure(RawShards="allow")
    assert hook.modify(TAGGED, **change).code == DENIED
    assert hook.modify(TAGGED, **change, uid=0).untouched


def test_user_cannot_turn_a_job_into_shards(hook: LuaHook) -> None:
    for record in (PLAIN, PROBED):
        refused = hook.modify(record, tres_per_node="gres/shard:1")
        assert refused.code == DENIED
        assert len(refused.said) == 1
        assert hook.modify(record, tres_per_node="gres/shard:1", uid=0).untouched
    assert hook.modify({"partition": "other"}, tres_per_node="gres/shard:1").untouched
    assert hook.modify({"partition": "other"}, partition="gpu", tres_per_node="gres/shard:1").code == DENIED
    hook.configure(RawShards="allow")
    assert hook.modify(PLAIN, tres_per_node="gres/shard:1").untouched


def test_user_cannot_forge_a_tag(hook: LuaHook) -> None:
    assert hook.modify(PLAIN, admin_comment="GS1:c=0").code == DENIED


@pytest.mark.parametrize("change", [{}, {"begin_time": 2_000_000_000}, {"comment": "x"}, {"features": "v100"}])
def test_other_changes_holds_and_releases_pass(hook: LuaHook, change: dict[str, str | int]) -> None:
    for record in (TAGGED, PROBED, PLAIN):
        assert hook.modify(record, **change).untouched


def test_probed_job_may_still_change_its_request(hook: LuaHook) -> None:
    assert hook.modify(PROBED, tres_per_node="gres/gpu:2").untouched


def test_model_as_type_becomes_a_feature_here_too(hook: LuaHook) -> None:
    answer = hook.modify({**PLAIN, "features": "intel"}, tres_per_node="gres/gpu:v100:2")
    assert answer.fields == {"tres_per_node": "gres/gpu:2", "features": "intel&v100"}


def test_before_23_02_nothing_is_said_because_slurm_drops_it_with_an_error(hook: LuaHook) -> None:
    hook.configure(SlurmVersion="22.05.8")
    refused = hook.modify(PLAIN, tres_per_node="gres:shard:1")
    assert (refused.code, refused.said) == (DENIED, [])
