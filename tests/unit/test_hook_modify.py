"""Who may change what of a job that exists."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, OTHERS, LuaHook, make_hook

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


@pytest.mark.parametrize("change", [{"num_tasks": 1}, {"cpus_per_task": 1}, {"ntasks_per_node": 1}])
def test_user_cannot_change_the_tasks_of_a_gang(hook: LuaHook, change: dict[str, int]) -> None:
    """It has one task a card: with fewer it would hold part of some cards only."""
    gang = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=shard:2;k=2"}
    assert hook.modify(gang, **change).code == DENIED
    assert hook.modify(gang, **change, uid=0).untouched
    assert hook.modify(TAGGED, **change).untouched


PLACED = {**TAGGED, "admin_comment": f"GS1:c=2;t={KNOWN};o=gpu:1;g=gpu0:1;n=0", "time_limit": 60}


@pytest.mark.parametrize(
    "change",
    [{"time_limit": 61}, {"time_limit": 4294967295}, {"num_tasks": 2}, {"cpus_per_task": 4}, {"min_cpus": 4},
     {"min_mem_per_node": 64_000}, {"min_mem_per_cpu": 9_000}],
)  # fmt: skip
def test_job_that_was_given_a_card_does_not_grow_before_it_starts(hook: LuaHook, change: dict[str, int]) -> None:
    """It goes ahead of the queue since it is short, and fits beside a neighbour."""
    refused = hook.modify(PLACED, **change)
    assert refused.code == DENIED
    assert "about to start" in refused.said[0]
    assert hook.modify(PLACED, **change, uid=0).untouched
    assert hook.modify(TAGGED, **change).untouched, "one that waits is looked at anew"


def test_job_that_was_given_a_card_may_become_shorter(hook: LuaHook) -> None:
    assert hook.modify(PLACED, time_limit=30).untouched


def test_shared_job_stays_where_it_is_measured(hook: LuaHook) -> None:
    """`twin` has nodes that share too, but is none of gpushare.conf's partitions: no sampler starts there."""
    for record in (TAGGED, PLACED):
        for partition in ("twin", "other", "gpu,twin"):
            assert hook.modify(record, partition=partition).code == DENIED
            assert hook.modify(record, partition=partition, uid=0).untouched
        assert hook.modify(record, partition="gpu2").untouched
    assert hook.modify(PROBED, partition="other").untouched


def test_user_cannot_ask_for_more_cpus_of_the_node_than_the_helper_counts(hook: LuaHook) -> None:
    assert hook.modify(TAGGED, pn_min_cpus=16).code == DENIED
    assert hook.modify(PLAIN, pn_min_cpus=16).untouched


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


@pytest.mark.parametrize(
    "change", [{}, {"begin_time": 2_000_000_000}, {"comment": f"x gpushare:{KNOWN}"}, {"features": "v100"}]
)
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


def test_job_whose_comment_is_taken_off_gets_its_whole_gpu_back(hook: LuaHook) -> None:
    """It becomes a request for the job, which the helper does not place, and our lease ends."""
    before_s = int(time.time() - 0.1)  # Lua asks time(2), whose clock may be a tick behind
    placed = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=gpu:1;w=gpu3;g=gpu1:0"}
    whole = {"tres_per_node": "gres/gpu:0", "tres_per_job": "gres/gpu:1"}
    for comment in ("", "grant 7"):
        out = hook.modify(TAGGED, comment=comment)
        assert (out.code, out.said) == (0, [])
        assert before_s <= int(out.fields.pop("begin_time")) <= time.time()
        assert out.fields == whole
        assert hook.modify(placed, comment=comment).fields == {**whole, "req_nodes": "gpu3"}
        assert hook.modify(TAGGED, comment=comment, req_nodes="").code == 0
        assert hook.modify(TAGGED, comment=comment, req_nodes="gpu2").code == DENIED
        assert hook.modify(PLAIN, comment=comment).untouched
        assert hook.modify(PROBED, comment=comment).untouched
        for tag in (
            f"GS1:c=2;t={KNOWN}",
            f"GS1:t={KNOWN}",
        ):  # its request is its own
            assert hook.modify({"partition": "gpu", "admin_comment": tag}, comment=comment).untouched
        gang = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=shard:2;k=4"}
        assert hook.modify(gang, comment=comment).code == DENIED


def test_job_that_has_opted_out_may_be_changed_before_the_helper_has_taken_its_tag_off(hook: LuaHook) -> None:
    left = {**TAGGED, "tres_per_node": "gres/gpu:0", "tres_per_job": "gres/gpu:1"}
    for change in ({"tres_per_job": "gres/gpu:2"}, {"partition": "other"}, {"num_tasks": 4}):
        assert hook.modify(left, **change).code == 0
    assert hook.modify(left, admin_comment="x").code == DENIED


def test_job_that_opts_out_has_its_own_nice_again(hook: LuaHook) -> None:
    """The helper's would start a request for a whole GPU before everybody. Slurm lets no user go below 0."""
    zero = 2**31
    for own, written in ((0, zero), (7, zero + 7), (-5, zero)):
        placed = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=gpu:1;g=gpu1:0;n={own}"}
        assert hook.modify(placed, comment="").fields["nice"] == str(written)
        assert "nice" not in hook.modify(placed, comment="", nice=zero + 9).fields
    assert "nice" not in hook.modify(TAGGED, comment="").fields


def test_what_a_new_comment_says_of_a_tagged_job_is_never_half_ignored(hook: LuaHook) -> None:
    for comment in (f"gpushare:{OTHERS}", f"gpushare:{KNOWN},max=5", "gpushare:oops", f"gpushare:{KNOWN} max=x"):
        refused = hook.modify(TAGGED, comment=comment)
        assert (refused.code, refused.fields, len(refused.said)) == (DENIED, {}, 1)
    capped = {**TAGGED, "admin_comment": TAGGED["admin_comment"] + ";m=5"}
    assert hook.modify(capped, comment=f"GPUSHARE={KNOWN} max=5").untouched


@pytest.mark.parametrize("release", ["22.05.8", "23.02.7"])
def test_job_that_this_slurm_cannot_change_back_stays_as_it_is(hook: LuaHook, release: str) -> None:
    hook.configure(SlurmVersion=release)
    tagged = {"partition": "gpu", "admin_comment": f"GS1:c=2;t={KNOWN};o=shard:v100_0:2;l=1"}
    refused = hook.modify(tagged, comment="")
    assert (refused.code, refused.fields) == (DENIED, {})
