"""What becomes of a submitted job, in each Lua that Slurm may be built with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lua_hook import INTERPRETERS, KNOWN, OTHERS, UNKNOWN, LuaHook, make_hook

from slurm_gpushare.protocol.tag import Tag, parse_tag

SHARED = {"comment": f"gpushare:{KNOWN}"}
NEW, OLD = "24.11.5", "22.05.8"


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


ONE_GPU = {
    "--gpus": {"tres_per_job": "gres/gpu:1"},
    "--gres": {"tres_per_node": "gres/gpu:1"},
    "--gres without a count": {"tres_per_node": "gres/gpu"},
    "--gpus-per-node": {"tres_per_node": "gres/gpu:1", "min_nodes": 1, "max_nodes": 1},
    "--gpus-per-socket": {"tres_per_socket": "gres/gpu:1", "sockets_per_node": 1},
    "--gpus-per-task": {"tres_per_task": "gres/gpu:1", "num_tasks": 1},
    "--gpus-per-task of 24.11": {"tres_per_task": "gres/gpu=1", "num_tasks": 1, "tres_bind": "gres/gpu:per_task:1"},
    "--ntasks-per-gpu": {"ntasks_per_tres": 2, "num_tasks": 2},
    "--gpus and -n": {"tres_per_job": "gres/gpu:1", "num_tasks": 4},
    "--gpus and --gpus-per-node": {"tres_per_job": "gres/gpu:1", "tres_per_node": "gres/gpu:1"},
    "--gpus=v100:1": {"tres_per_job": "gres/gpu:v100:1"},
}


@pytest.mark.parametrize("desc", ONE_GPU.values(), ids=ONE_GPU)
def test_one_gpu_asked_for_in_any_way_becomes_one_gpu_per_node(hook: LuaHook, desc: dict[str, str | int]) -> None:
    before_s = int(time.time() - 0.1)  # Lua asks time(2), whose clock may be a tick behind
    answer = hook.submit(**SHARED, **desc)
    assert (answer.code, answer.logged) == (0, [])
    assert answer.fields.get("tres_per_node", desc.get("tres_per_node")) == "gres/gpu:1"
    for name in ("tres_per_job", "tres_per_socket", "tres_per_task", "tres_bind"):
        if name in desc:
            assert answer.fields[name] == ""
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert (tag.cluster, tag.token, tag.original, tag.lease, tag.probe) == (2, KNOWN, "gpu:1", True, False)
    assert before_s + 30 <= int(answer.fields["begin_time"]) <= time.time() + 30
    assert len(answer.said) == 1
    assert "may share" in answer.said[0]


def test_several_tasks_on_one_gpu_stay_on_one_node(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1", num_tasks=4)
    assert (answer.fields["min_nodes"], answer.fields["max_nodes"]) == ("1", "1")


def test_tasks_per_gpu_become_a_number_of_tasks(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, ntasks_per_tres=2, num_tasks=2)
    assert answer.fields["ntasks_per_tres"] == "65534"  # unset
    assert "num_tasks" not in answer.fields


def test_what_sbatch_repeats_of_c_in_tres_per_task_is_kept(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, tres_per_task="cpu=4,gres/gpu=1", num_tasks=1, cpus_per_task=4)
    assert answer.fields["tres_per_task"] == "cpu=4"
    assert answer.fields["tres_per_node"] == "gres/gpu:1"


LEFT_ALONE = {
    "two GPUs": ({"tres_per_job": "gres/gpu:2"}, "more than one GPU"),
    "another kind": ({"tres_per_node": "gres/gpu:1,gres/nic:1"}, "several kinds"),
    "another type": ({"tres_per_node": "gres/gpu:a100:1"}, "another type"),
    "an index by its type": ({"tres_per_node": "gres/gpu:v100_1:1"}, "names one GPU"),
    "no GPU": ({}, "no GPU"),
    "several nodes": ({"tres_per_node": "gres/gpu:1", "min_nodes": 2, "max_nodes": 2}, "more than one node"),
    "nodes counted in a constraint": ({"tres_per_node": "gres/gpu:1", "features": "v100*2"}, "a number of nodes"),
    "a count of 0": ({"tres_per_node": "gres/gpu:0"}, "it asks for no GPU"),
    "a range of nodes": ({"tres_per_node": "gres/gpu:1", "min_nodes": 1, "max_nodes": 4}, "-N 1"),
    "tasks that may spread": ({"tres_per_node": "gres/gpu:1", "num_tasks": 4}, "-N 1"),
    "a GPU for each task": ({"tres_per_task": "gres/gpu:1", "num_tasks": 2}, "several tasks"),
    "a GPU for each socket": ({"tres_per_socket": "gres/gpu:1"}, "each socket"),
    "several nodes by -w": ({"tres_per_node": "gres/gpu:1", "req_nodes": "gpu[0-1]"}, "-w"),
    "other tasks per GPU": ({"ntasks_per_tres": 2, "num_tasks": 6}, "do not make one GPU"),
    "a heterogeneous job": ({"tres_per_node": "gres/gpu:1", "het_job_offset": 0}, "heterogeneous"),
    "--exclusive": ({"tres_per_node": "gres/gpu:1", "shared": 0}, "whole node"),
    "--exclusive=user": ({"tres_per_node": "gres/gpu:1", "shared": 2}, "whole node"),
    "--immediate": ({"tres_per_node": "gres/gpu:1", "immediate": 1}, "--immediate"),
    "-M": ({"tres_per_node": "gres/gpu:1", "clusters": "there"}, "other clusters"),
    "--gpu-freq": ({"tres_per_node": "gres/gpu:1", "tres_freq": "gpu:low"}, "--gpu-freq"),
    "--gpu-bind": ({"tres_per_node": "gres/gpu:1", "tres_bind": "gpu:closest"}, "--gpu-bind"),
    "an odd split of CPUs": (
        {"tres_per_job": "gres/gpu:1", "num_tasks": 3, "cpus_per_tres": "gres/gpu:8"},
        "split evenly",
    ),
    "another partition": ({"tres_per_node": "gres/gpu:1", "partition": "other"}, "partitions"),
    "one partition of two": ({"tres_per_node": "gres/gpu:1", "partition": "gpu,other"}, "partitions"),
}


@pytest.mark.parametrize(("desc", "why"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_cannot_share_is_left_alone_and_says_why(hook: LuaHook, desc: dict[str, str | int], why: str) -> None:
    answer = hook.submit(**SHARED, **desc)
    assert answer.untouched
    assert len(answer.said) == 1
    assert why in answer.said[0]
    without_token = hook.submit(**desc)
    assert without_token.untouched
    assert without_token.said == []


def test_interactive_jobs_are_left_alone(hook: LuaHook) -> None:
    answer = hook.submit(batch=False, **SHARED, tres_per_job="gres/gpu:1")
    assert answer.untouched
    assert "only sbatch jobs" in answer.said[0]


@pytest.mark.parametrize(
    "desc", [{"tres_per_job": "gres/gpu:1"}, {"tres_per_node": "gres/gpu:1"}, {"tres_per_node": "gres/gpu:v100:1"}]
)
def test_a_first_run_is_written_so_that_it_can_share_if_it_still_waits_when_it_is_known(
    hook: LuaHook, desc: dict[str, str]
) -> None:
    answer = hook.submit(comment=f"gpushare:{UNKNOWN},max=10,requeue=yes", **desc)
    assert answer.fields.get("tres_per_node", "gres/gpu:1") == "gres/gpu:1", "a whole GPU"
    assert parse_tag(answer.fields["admin_comment"]) == Tag(
        probe=True, token=UNKNOWN, original="gpu:1", max_isd_pct=10, requeue=True
    )
    assert "begin_time" not in answer.fields, "no lease: it waits for nobody but Slurm"
    assert "Whatever still waits when that is done may share" in answer.said[0]


ONLY_LATER: dict[str, tuple[dict[str, str], dict[str, str | int]]] = {
    "22.05": ({"SlurmVersion": OLD}, {"tres_per_node": "gres:gpu:1"}),
    "memory of each GPU": ({}, {"tres_per_node": "gres/gpu:1", "mem_per_tres": "gres/gpu:100"}),
    "CPUs of each GPU": ({}, {"tres_per_node": "gres/gpu:1", "cpus_per_tres": "gres/gpu:4"}),
    "DefMemPerGPU": ({"DefMemPerGpu": "gpu:9000"}, {"tres_per_node": "gres/gpu:1"}),
    "a GPU of each task": ({}, {"tres_per_task": "gres/gpu:1"}),
    "a clock of its own": ({}, {"tres_per_node": "gres/gpu:1", "tres_freq": "gpu:low"}),
}


@pytest.mark.parametrize(("settings", "desc"), ONLY_LATER.values(), ids=ONLY_LATER)
def test_a_first_run_that_cannot_be_changed_any_more_stays_as_it_is_and_says_so(
    hook: LuaHook, settings: dict[str, str], desc: dict[str, str | int]
) -> None:
    hook.configure(**settings)
    answer = hook.submit(comment=f"gpushare:{UNKNOWN}", **desc)
    assert answer.fields.pop("admin_comment") == f"GS1:probe;t={UNKNOWN}"
    assert answer.fields == hook.submit(**desc).fields, "what a job without a token becomes"
    assert "Runs submitted after that may share." in answer.said[0]


def test_without_a_helper_a_first_run_is_left_as_written(hook: LuaHook) -> None:
    hook.hook_file.unlink()
    hook.write_hook_file(heartbeat_age_s=3600)
    answer = hook.submit(comment=f"gpushare:{UNKNOWN}", tres_per_job="gres/gpu:1")
    assert answer.fields == {"admin_comment": f"GS1:probe;t={UNKNOWN}"}


def test_a_job_with_another_users_token_runs_as_written_and_is_told_what_to_do(hook: LuaHook) -> None:
    theirs = hook.submit(comment=f"gpushare:{OTHERS}", tres_per_job="gres/gpu:1")
    assert theirs.fields == {}
    (said,) = theirs.said
    assert "its token is another user's. Make one of your own with: gpushare token NAME" in said


def test_job_without_a_token_is_not_touched(hook: LuaHook) -> None:
    for desc in ONE_GPU.values():
        if "v100" not in str(desc):
            assert hook.submit(**desc).untouched


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("gpushare:resnet", "not a workload token"),
        ("gpushare:", "not a workload token"),
        ("gpushare:gs-short", "not a workload token"),
        (f"gpushare:{KNOWN.upper()}", "not a workload token"),
        (f"gpushare:{KNOWN}' OR '1'='1", "not a workload token"),
        (f"gpushare:{KNOWN},max=much", "max=PERCENT"),
        ("gpushare:" + "a" * 1_000_000, "longer than 1024"),
    ],
)
def test_comment_that_is_not_a_token_changes_nothing(hook: LuaHook, comment: str, said: str) -> None:
    answer = hook.submit(comment=comment, tres_per_job="gres/gpu:1")
    assert answer.untouched
    assert said in answer.said[0]


def test_name_that_the_client_filter_took_out_is_not_spoken_of_twice(hook: LuaHook) -> None:
    answer = hook.submit(comment="gpushare:?,max=10", tres_per_job="gres/gpu:1")
    assert answer.untouched
    assert not answer.said


def test_comment_may_hold_other_words(hook: LuaHook) -> None:
    answer = hook.submit(comment=f"grant 7 gpushare:{KNOWN},max=10", tres_per_job="gres/gpu:1")
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert tag.max_isd_pct == 10


def test_tag_is_appended_to_an_admin_comment_and_keeps_the_users_nodes(hook: LuaHook) -> None:
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1", admin_comment="ticket 5", req_nodes="gpu0", min_nodes=1)
    assert answer.fields["admin_comment"].startswith("ticket 5 GS1:c=2;")
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert tag.nodes == "gpu0"


@pytest.mark.parametrize(
    ("fields", "consents"),
    [({}, False), ({"requeue": 1}, True), ({"requeue": 0}, False), ({"comment": "requeue=yes"}, True),
     ({"comment": "requeue=no", "requeue": 1}, False)],
)  # fmt: skip
def test_being_requeued_is_the_owners_own_word(hook: LuaHook, fields: dict[str, Any], consents: bool) -> None:
    comment = f"{SHARED['comment']} {fields.get('comment', '')}"
    answer = hook.submit(**{**SHARED, "tres_per_job": "gres/gpu:1", **fields, "comment": comment})
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert tag.requeue is consents


def test_users_own_begin_is_kept(hook: LuaHook) -> None:
    later = int(time.time()) + 3600
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1", begin_time=later)
    tag = parse_tag(answer.fields["admin_comment"])
    assert tag is not None
    assert not tag.lease
    assert "begin_time" not in answer.fields


def test_helper_that_does_not_beat_is_dead(hook: LuaHook) -> None:
    hook.hook_file.unlink()
    hook.write_hook_file(heartbeat_age_s=600)
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1")
    assert "not running" in answer.said[0]
    assert answer.fields.keys() == {"admin_comment"}, "the request stays as it was"
    assert parse_tag(answer.fields["admin_comment"]) == Tag(token=KNOWN), "its telemetry must not be lost"


def test_policy_off_shares_nothing(hook: LuaHook) -> None:
    hook.configure(Policy="off")
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1")
    assert answer.untouched
    assert "switched off" in answer.said[0]


@pytest.mark.parametrize("desc", ONE_GPU.values(), ids=ONE_GPU)
def test_in_the_shadow_a_known_job_is_tagged_and_otherwise_as_written(
    hook: LuaHook, desc: dict[str, str | int]
) -> None:
    plain = hook.submit(**desc)
    hook.configure(Policy="shadow")
    answer = hook.submit(comment=f"gpushare:{KNOWN},max=10", **desc)
    assert parse_tag(answer.fields.pop("admin_comment")) == Tag(token=KNOWN, max_isd_pct=10)
    assert answer.fields == plain.fields, "what a job without a token becomes: no lease, no other request"
    assert answer.said == [
        "gpushare: this job is measured and runs as written: this site only works out what sharing would do."
    ]


def test_in_the_shadow_an_unknown_job_is_measured_and_told_the_same(hook: LuaHook) -> None:
    hook.configure(Policy="shadow")
    known = hook.submit(**SHARED, tres_per_job="gres/gpu:1")
    unknown = hook.submit(comment=f"gpushare:{UNKNOWN}", tres_per_job="gres/gpu:1")
    assert unknown.fields == {"admin_comment": f"GS1:probe;t={UNKNOWN}"}
    assert unknown.said == known.said


def test_what_belongs_to_the_gpu_becomes_plain_requests(hook: LuaHook) -> None:
    answer = hook.submit(
        **SHARED, tres_per_job="gres/gpu:1", num_tasks=2, cpus_per_tres="gres/gpu:8", mem_per_tres="gres/gpu:16384"
    )
    assert answer.fields["cpus_per_tres"] == answer.fields["mem_per_tres"] == ""
    assert answer.said[1] == (
        "gpushare: inside this job write srun -c 4, not srun --cpus-per-gpu: a shared GPU cannot carry that option."
    )
    assert answer.fields["cpus_per_task"] == "4"
    assert answer.fields["min_cpus"] == "8"
    assert answer.fields["min_mem_per_node"] == "16384"


def test_partition_defaults_per_gpu_become_plain_requests(hook: LuaHook) -> None:
    hook.configure(DefCpuPerGpu="gpu:6", DefMemPerGpu="gpu:9000")
    answer = hook.submit(**SHARED, tres_per_job="gres/gpu:1")
    assert answer.fields["cpus_per_task"] == "6"
    assert answer.fields["min_mem_per_node"] == "9000"
    own = hook.submit(**SHARED, tres_per_job="gres/gpu:1", cpus_per_task=2, min_mem_per_node=100)
    assert "cpus_per_task" not in own.fields
    assert "min_mem_per_node" not in own.fields
    assert hook.submit(**SHARED, tres_per_job="gres/gpu:1", partition="gpu,gpu2").untouched


def test_before_23_02_6_shards_are_typed_and_spread_over_the_indices(hook: LuaHook) -> None:
    hook.configure(SlurmVersion=OLD)
    jobs = hook.answers(
        "\n".join(f'run.submit({{comment="gpushare:{KNOWN}", tres_per_job="gres:gpu:1"}})' for _ in range(4))
    )
    requests = [job.fields["tres_per_node"] for job in jobs]
    assert sorted(requests) == ["gres:shard:v100_0:2"] * 2 + ["gres:shard:v100_1:2"] * 2
    tag = parse_tag(jobs[0].fields["admin_comment"])
    assert tag is not None
    assert f"gres:{tag.original}" == requests[0]


@pytest.mark.parametrize("release", [OLD, "23.02.7", "23.11.4"])
def test_before_23_11_5_any_single_gpu_is_all_shards_of_one(hook: LuaHook, release: str) -> None:
    hook.configure(SlurmVersion=release)
    assert hook.submit(tres_per_job="gres:gpu:1").fields == {"tres_per_job": "", "tres_per_node": "gres:shard:2"}
    assert hook.submit(tres_per_job="gres:gpu:v100_1:1").fields["tres_per_node"] == "gres:shard:v100_1:2"
    typed = hook.submit(tres_per_job="gres:gpu:v100:1").fields
    assert (typed["tres_per_node"], typed["features"]) == ("gres:shard:2", "v100")
    probe = hook.submit(comment=f"gpushare:{UNKNOWN}", tres_per_node="gres:gpu:1").fields
    may_wait = "" if release == OLD else ";o=shard:2"
    assert probe == {"tres_per_node": "gres:shard:2", "admin_comment": f"GS1:probe;t={UNKNOWN}{may_wait}"}
    assert hook.submit(tres_per_job="gres:gpu:2").untouched
    assert hook.submit(batch=False, tres_per_job="gres:gpu:1").untouched


def test_releases_that_can_retarget_untyped_shards_need_no_type(hook: LuaHook) -> None:
    hook.configure(SlurmVersion="23.02.7")
    assert hook.submit(**SHARED, tres_per_job="gres:gpu:1").fields["tres_per_node"] == "gres:shard:2"


def test_without_a_version_the_prefix_is_the_users_own(hook: LuaHook) -> None:
    hook.configure(SlurmVersion="")
    assert hook.submit(**SHARED, tres_per_job="gres:gpu:1").fields["tres_per_node"] == "gres:gpu:1"


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        (None, "v100"),
        ("intel", "intel&v100"),
        ("v100", None),
        ("intel&v100", None),
        ("a,b", "a,b&v100"),
        ("a|b", "(a|b)&v100"),
        ("(a|b)&c", "(a|b)&c&v100"),
        ("[rack1|rack2]", "v100&[rack1|rack2]"),
        ("fast&[rack1|rack2]", "v100&fast&[rack1|rack2]"),
    ],
)
def test_model_as_type_becomes_a_feature(hook: LuaHook, features: str | None, wanted: str | None) -> None:
    given = {"features": features} if features else {}
    answer = hook.submit(tres_per_node="gres/gpu:v100:4,gres/nic:1", **given)
    assert answer.fields["tres_per_node"] == "gres/gpu:4,gres/nic:1"
    assert answer.fields.get("features") == wanted
    assert answer.said == []


@pytest.mark.parametrize("features", ["[rack1*2&rack2*4]", "a|(b&c)", "big*4", "((a)", "a[b"])
def test_constraint_that_cannot_be_extended_is_left_to_its_user(hook: LuaHook, features: str) -> None:
    answer = hook.submit(tres_per_node="gres/gpu:v100:4", features=features)
    assert answer.untouched
    assert "constraint" in answer.said[0]


@pytest.mark.parametrize(
    "desc",
    [
        {"tres_per_node": "gres/shard:1"},
        {"tres_per_job": "gres:shard:v100_0:1"},
        {"tres_per_task": "gres/shard=1", "num_tasks": 1},
        {"tres_per_node": "gres/nic:1,shard"},
    ],
)
def test_raw_shards_of_users_are_refused_on_shared_partitions(hook: LuaHook, desc: dict[str, str | int]) -> None:
    refused = hook.submit(**desc)
    assert (refused.code, refused.fields) == (2002, {})
    assert len(refused.said) == 1
    assert hook.submit(**desc, partition="gpu,other").code == 2002
    assert hook.submit(**desc, partition="other").untouched
    assert hook.submit(**desc, uid=0).untouched
    hook.configure(RawShards="allow")
    assert hook.submit(**desc).untouched


MODELS = 'run.site.models.v100, run.site.models.p100 = "gpu[0-1]", "gpu7"\n'


def test_model_needs_no_configuration_file(hook: LuaHook) -> None:
    """What `gpushare configure` wrote into the script is enough, on every partition with such nodes."""
    hook.conf.unlink()
    jobs = [
        '{tres_per_node="gres/gpu:v100:2", features="intel"}',
        '{tres_per_job="gres/gpu:p100:1", partition="other"}',
        f'{{tres_per_job="gres/gpu:v100:1", partition="twin", comment="gpushare:{KNOWN}"}}',
        '{tres_per_node="gres/gpu:v100:1", partition="gpu2"}',
        '{tres_per_node="gres/gpu:a100:1"}',
        '{tres_per_node="gres/gpu:v100:1,gres/gpu:p100:1"}',
    ]
    found = hook.answers(MODELS + "".join(f"run.submit({job})\n" for job in jobs))
    assert [answer.code for answer in found] == [0] * 6
    assert found[0].fields == {"tres_per_node": "gres/gpu:2", "features": "intel&v100"}
    assert found[1].fields == {"tres_per_job": "gres/gpu:1", "features": "p100"}
    assert found[2].fields == {"tres_per_job": "gres/gpu:1", "features": "v100"}
    assert "not available" in found[2].said[0]
    assert [answer.fields for answer in found[3:]] == [{}, {}, {}]  # other nodes, another model, two models
    (changed,) = hook.answers(MODELS + 'run.modify({tres_per_node="gres/gpu:v100:1"}, {partition="gpu"})')
    assert changed.fields == {"tres_per_node": "gres/gpu:1", "features": "v100"}


def test_a_job_that_slurm_will_refuse_gets_no_word_of_ours(hook: LuaHook) -> None:
    """More GPUs of a node than there are, or a partition that is not there: Slurm says why, and only Slurm."""
    for desc in ({"tres_per_node": "gres/gpu:999"}, {"tres_per_job": "gres/gpu:1", "partition": "nowhere"}):
        assert hook.submit(**SHARED, **desc).said == []
    assert hook.submit(**SHARED, tres_per_job="gres/gpu:3").said, "on two nodes there are as many"


def test_where_mps_is_managed_a_known_job_says_what_it_may_take_of_a_card(hook: LuaHook) -> None:
    hook.hook_file.unlink()
    hook.write_hook_file(models="a100=0/1/9000,v100=2/1/8234")
    known = {"comment": f"gpushare:{KNOWN}", "tres_per_node": "gres/gpu:1"}
    assert "environment.GPUSHARE_MEMORY" not in hook.submit(**known).fields
    hook.configure(Mps="user")
    assert hook.submit(**known).fields["environment.GPUSHARE_MEMORY"] == "8234"
    unknown = hook.submit(comment=f"gpushare:{UNKNOWN}", tres_per_node="gres/gpu:1")
    assert "environment.GPUSHARE_MEMORY" not in unknown.fields, "a first run is what it is measured by"
