"""The filter in the user's own commands: names become tokens, and steps fit a job that has shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from lua_hook import INTERPRETERS, LuaHook, literal, make_hook

from slurm_gpushare.protocol.tokens import TokenFile


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


def filtered(hook: LuaHook, comment: str) -> tuple[str, str]:
    """The comment that leaves the user's side, and what the user is told."""
    out = hook.chunk(
        f"""local options = {{ type = "sbatch", comment = {literal(comment)} }}
        assert(slurm_cli_pre_submit(options, 0) == slurm.SUCCESS)
        print(options.comment); print(run.logged[1] or "")"""
    )
    kept, told = out.rstrip("\n").split("\n") if out.count("\n") > 1 and not out.endswith("\n\n") else (out.strip(), "")
    return kept, told


def test_name_becomes_the_users_token(hook: LuaHook) -> None:
    tokens = TokenFile(hook.directory / ".config/gpushare/tokens")
    resnet, spaced = tokens.get_or_make("resnet"), tokens.get_or_make("my great net")
    assert filtered(hook, "gpushare:resnet") == (f"gpushare:{resnet}", "")
    assert filtered(hook, "gpushare:resnet,max=10") == (f"gpushare:{resnet},max=10", "")
    assert filtered(hook, "gpushare:my great net,max=5") == (f"gpushare:{spaced},max=5", "")
    assert filtered(hook, "grant 7 gpushare:resnet") == (f"grant 7 gpushare:{resnet}", "")
    assert filtered(hook, "gpushare:resnet and more") == (f"gpushare:{resnet} and more", "")
    assert filtered(hook, "GPUSHARE:resnet") == (f"gpushare:{resnet}", "")
    assert filtered(hook, "gpushare=resnet") == (f"gpushare:{resnet}", "")
    assert filtered(hook, "gpushare:resnet max=10") == (f"gpushare:{resnet} max=10", "")
    assert filtered(hook, "gpushare:my great net Max=5") == (f"gpushare:{spaced} Max=5", "")


def test_name_may_be_followed_by_any_option_and_by_other_words(hook: LuaHook) -> None:
    tokens = TokenFile(hook.directory / ".config/gpushare/tokens")
    short, long = tokens.get_or_make("my net"), tokens.get_or_make("my net two")
    for rest in (" requeue=yes", " cpus=auto", " Requeue=no,max=5", " max=10 requeue=yes", " for grant 7", " twofold"):
        assert filtered(hook, f"gpushare:my net{rest}") == (f"gpushare:{short}{rest}", "")
        assert filtered(hook, f"gpushare:my net two{rest}") == (f"gpushare:{long}{rest}", "")


def test_name_that_looks_like_a_token_but_is_too_short_or_long_is_a_name(hook: LuaHook) -> None:
    tokens = TokenFile(hook.directory / ".config/gpushare/tokens")
    for name in ("gs-bicycle", "gs-" + "a" * 33):
        assert filtered(hook, f"gpushare:{name}")[0] == "gpushare:?"
        assert filtered(hook, f"gpushare:{tokens.get_or_make(name)}") == (f"gpushare:{tokens.find(name)}", "")
        assert filtered(hook, f"gpushare:{name},max=5") == (f"gpushare:{tokens.find(name)},max=5", "")


def test_token_and_other_comments_pass_as_they_are(hook: LuaHook) -> None:
    for comment in (f"gpushare:gs-{'a' * 20}", f"gpushare:gs-{'a' * 20},max=3 x", "nothing of ours", "gpushare:"):
        assert filtered(hook, comment) == (comment, "")


def test_name_without_a_token_never_leaves_the_users_side(hook: LuaHook) -> None:
    kept, told = filtered(hook, "gpushare:secret-project,max=10")
    assert kept == "gpushare:?,max=10"
    assert "gpushare token" in told
    kept, told = filtered(hook, "grant 7 gpushare:secret project requeue=yes for grant 7")
    assert kept == "grant 7 gpushare:? requeue=yes for grant 7"
    assert "'secret project'" in told


def test_mistyped_token_and_unrun_command_are_left_to_the_hook_which_has_the_one_word_for_them(hook: LuaHook) -> None:
    mistyped = "gs2-k3v7mq2h5xw4tz6ybdx"
    assert filtered(hook, f"gpushare:{mistyped},max=3") == (f"gpushare:{mistyped},max=3", "")
    assert filtered(hook, "gpushare:$(gpushare token secret),max=3") == ("gpushare:$(,max=3", "")


def test_name_of_thousands_of_letters_is_not_said_whole(hook: LuaHook) -> None:
    kept, told = filtered(hook, f"gpushare:{'a' * 3000}")
    assert kept == "gpushare:?"
    assert len(told) < 250


def step(
    hook: LuaHook, options: dict[str, str], shards: int = 2, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str] | None:
    out = hook.chunk(
        f"""local options, environment = {literal(options)}, {literal(dict(environment))}
        local wanted = run.client.step_options(
          run.client.reader(options), "{shards}", function(name) return environment[name] end, function() end)
        for name, value in pairs(wanted or {{ none = "" }}) do print(name .. "=" .. value) end"""
    )
    found = dict(line.split("=", 1) for line in out.splitlines())
    return None if "none" in found else found


@pytest.mark.parametrize(
    ("options", "cleared"),
    [
        ({}, {}),
        ({"gpus": "1"}, {"gpus": ""}),
        ({"gpus": "v100:1"}, {"gpus": ""}),
        ({"gpus-per-node": "1"}, {"gpus-per-node": ""}),
        ({"gpus-per-task": "1", "ntasks": "1"}, {"gpus-per-task": ""}),
        ({"gpus-per-socket": "1"}, {"gpus-per-socket": ""}),
        ({"gres": "gpu:1"}, {}),
        ({"gres": "gres/gpu:v100:1"}, {}),
        ({"gres": "gpu"}, {}),
        ({"gpus": "1", "gpu-bind": "closest"}, {"gpus": "", "gpu-bind": "none"}),
        ({"gpus": "1", "gpu-bind": "x", "tres-bind": "gres/gpu:x"}, {"gpus": "", "tres-bind": "gres/shard:none"}),
        ({"tres-bind": "gres/gpu:per_task:1"}, {"tres-bind": "gres/shard:none"}),
    ],
)
def test_step_that_wants_the_jobs_gpu_gets_its_shards(
    hook: LuaHook, options: dict[str, str], cleared: dict[str, str]
) -> None:
    assert step(hook, options) == {**cleared, "gres": "shard:2"}


@pytest.mark.parametrize(
    "options",
    [
        {"gres": "shard:1"},
        {"gres": "none"},
        {"gres": "gpu:1,nic:1"},
        {"gpus": "2"},
        {"gpus-per-task": "1", "ntasks": "2"},
    ],
)
def test_step_with_a_mind_of_its_own_is_left_alone(hook: LuaHook, options: dict[str, str]) -> None:
    assert step(hook, options) is None


GANG = {"GPUSHARE_GANG": "4:0:0"}


@pytest.mark.parametrize(
    ("options", "cards", "cleared"),
    [
        ({}, 4, {}),
        ({"gpus": "4"}, 4, {"gpus": ""}),
        ({"gpus": "1", "ntasks": "1"}, 1, {"gpus": ""}),
        ({"gres": "gpu:v100:3"}, 3, {}),
        ({"gpus-per-node": "4", "gpus": "2"}, 2, {"gpus-per-node": "", "gpus": ""}),
        ({"gpus-per-task": "2", "ntasks": "1"}, 2, {"gpus-per-task": ""}),
    ],
)
def test_a_gangs_step_gets_as_many_of_its_cards_as_it_asks_for(
    hook: LuaHook, options: dict[str, str], cards: int, cleared: dict[str, str]
) -> None:
    for a_card in (1, 2):
        assert step(hook, options, 4 * a_card, GANG) == {**cleared, "gres": f"shard:{cards * a_card}"}


def test_each_task_of_a_gangs_step_gets_cards_of_its_own_where_it_asks_for_them(hook: LuaHook) -> None:
    bound = {"tres-bind": "gres/gpu:per_task:1"}
    for_each = {"gpus-per-task": "1", "tres-per-task": "cpu=2,gres/gpu:1", "ntasks": "4", "gpus": "4"} | bound
    assert step(hook, for_each, 8, GANG) == {
        "gpus": "",
        "gpus-per-task": "",
        "tres-per-task": "cpu=2,gres/shard:2",
        "tres-bind": "gres/shard:per_task:2",
        "gres": "",
    }
    single = {"ntasks": "4", "gpu-bind": "single:1", "tres-bind": "gres/gpu:single:1"}
    assert step(hook, single, 4, GANG) == {
        "tres-per-task": "gres/shard:1", "tres-bind": "gres/shard:per_task:1", "gres": ""
    }  # fmt: skip
    assert step(hook, {"gpus-per-task": "2", "ntasks": "4"}, 4, GANG) is None, "there are not so many"
    assert step(hook, {"gpus": "5"}, 4, GANG) is None


def test_a_gang_whose_tasks_cannot_be_bound_as_they_ask_is_told(hook: LuaHook) -> None:
    def told(bind: str, tasks: int) -> str:
        options = {"ntasks": str(tasks), "tres-bind": bind}
        out = hook.chunk(
            f"""local options, environment = {literal(options)}, {literal(GANG)}
            local _, line = run.client.step_options(
              run.client.reader(options), "4", function(name) return environment[name] end, function() end)
            print(line or "")"""
        )
        return out.strip()

    assert told("gres/gpu:map_gpu:3,2,1,0", 4).startswith("--gpu-bind=map_gpu:3,2,1,0 is not possible")
    assert told("gres/gpu:single:1", 8).startswith("--gpu-bind=single:1 is not possible")
    for bind, tasks in (("gres/gpu:single:1", 4), ("gres/gpu:none", 4), ("gres/gpu:closest", 1)):
        assert told(bind, tasks) == ""


def renamed(hook: LuaHook, options: dict[str, str], *, is_step: bool) -> dict[str, str]:
    """The options that srun gets instead, on a site whose V100s and P100s have one type for each index."""
    out = hook.chunk(
        f"""run.clients_site.models.v100, run.clients_site.models.p100 = "gpu[0-1]", "old[0-1]"
        local options = {literal(options)}
        local wanted = run.client.without_model(run.client.reader(options), {str(is_step).lower()})
        for name, value in pairs(wanted or {{}}) do print(name .. "=" .. value) end"""
    )
    return dict(line.split("=", 1) for line in out.splitlines())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"gpus": "v100:2"}, {"gpus": "2"}),
        ({"gpus": "v100"}, {"gpus": "1"}),
        ({"gres": "gpu:v100:1"}, {"gres": "gpu:1"}),
        ({"gres": "gres:gpu:p100:1,gres:nic:2"}, {"gres": "gres:gpu:1,gres:nic:2"}),
        ({"gpus-per-node": "v100:1", "gpus": "v100:2"}, {"gpus-per-node": "1", "gpus": "2"}),
        ({"gpus-per-task": "v100:1"}, {"gpus-per-task": "1"}),
        ({"gpus-per-socket": "v100:1"}, {"gpus-per-socket": "1"}),
        ({"tres-per-task": "gres/gpu:v100=1"}, {"tres-per-task": "gres/gpu=1"}),
        ({"gpus": "2"}, {}),
        ({"gpus": "a100:2"}, {}),
        ({"gpus": "v100_1:1"}, {}),
        ({"gres": "shard:1"}, {}),
        ({"gpus": "v100:1", "gres": "gpu:p100:1"}, {}),
        ({"gpus": "unset", "gres": ""}, {}),
    ],
)
def test_srun_may_name_gpus_by_their_model(hook: LuaHook, options: dict[str, str], wanted: dict[str, str]) -> None:
    assert renamed(hook, options, is_step=True) == wanted
    model = {"constraint": "p100" if "p100" in str(options) else "v100"} if wanted else {}
    assert renamed(hook, options, is_step=False) == wanted | model


def test_srun_of_a_job_keeps_its_constraint_beside_the_model(hook: LuaHook) -> None:
    wanted = renamed(hook, {"gpus": "v100:1", "constraint": "a|b"}, is_step=False)
    assert wanted["constraint"] == "(a|b)&v100"
    assert renamed(hook, {"gpus": "v100:1", "constraint": "a*2"}, is_step=False) == {}


def test_step_that_asks_for_no_gpu_sees_none(hook: LuaHook) -> None:
    assert step(hook, {"gpus": "0"}) == {"gres": "none"}
    assert step(hook, {"gpus": "0", "gpus-per-node": "1", "tres-per-task": "cpu=2"}) == {
        "gpus-per-node": "", "gres": "none"
    }  # fmt: skip
    assert step(hook, {"gpus": "0"}, 4, GANG) == {"gres": "none"}
    # As on whole cards: what else asks for one keeps it visible.
    assert step(hook, {"gpus": "0", "gpus-per-socket": "1"}) == {"gpus": "", "gpus-per-socket": "", "gres": "shard:2"}


def test_tasks_share_a_card_where_slurm_is_told_so(hook: LuaHook) -> None:
    options = {"gpus-per-task": "1", "ntasks": "2", "overcommit": "set", "gpus-per-node": "1"}
    assert step(hook, options) == {"gpus-per-task": "", "gpus-per-node": "", "gres": "shard:2"}
    assert step(hook, options | {"overcommit": "unset"}) is None
    assert step(hook, options, 2, {"SLURM_STEP_GRES": "gres:shard:2"}) is None, "22.05 kills them"


def amounts(hook: LuaHook, options: dict[str, str], environment: dict[str, str], *, written: bool = False) -> list[str]:
    """What srun gets instead, or why it is refused."""
    out = hook.chunk(
        f"""local environment = {literal(environment)}
        local wanted, _, refusal = run.client.step_options(run.client.reader({literal(options)}), "1",
          function(name) return environment[name] end, function() return {literal(written)} end)
        if refusal then print(refusal) return end
        for name, value in pairs(wanted) do print(name .. "=" .. value) end"""
    )
    return sorted(out.splitlines())


def test_step_of_a_shared_job_takes_what_the_job_has_for_each_gpu(hook: LuaHook) -> None:
    job = {"SLURM_CPUS_PER_GPU": "4", "SLURM_MEM_PER_GPU": "1000"}
    for prefix, reset in (("gres:", ["cpus-per-gpu=4294967296"]), ("gres/", [])):
        environment = job | {"SLURM_STEP_GRES": f"{prefix}shard:1"}
        found = amounts(hook, {"gpus": "1", "cpus-per-gpu": "4", "mem-per-gpu": "1000"}, environment)
        assert found == sorted(["gpus=", "gres=shard:1", "cpus-per-task=4", "mem=1000", *reset])


def test_memory_for_each_gpu_of_a_step_is_the_jobs(hook: LuaHook) -> None:
    assert amounts(hook, {"mem-per-gpu": "500"}, {"SLURM_STEP_GRES": "gres/shard:1"}) == [
        "gres=shard:1", "mem-per-gpu=0"
    ]  # fmt: skip


@pytest.mark.parametrize(("job", "written"), [({}, False), ({"SLURM_CPUS_PER_GPU": "2"}, False),
                                              ({"SLURM_CPUS_PER_GPU": "4"}, True)])  # fmt: skip
def test_cpus_for_each_gpu_that_srun_does_not_let_go_of_are_refused_with_what_to_write(
    hook: LuaHook, job: dict[str, str], written: bool
) -> None:
    options = {"cpus-per-gpu": "4", "ntasks": "2"}
    (refusal,) = amounts(hook, options, {"SLURM_STEP_GRES": "gres/shard:1", **job}, written=written)
    assert refusal == "--cpus-per-gpu is not possible in a step of a job that shares its GPU: write -c 2 instead"
    old = amounts(hook, options, {"SLURM_STEP_GRES": "gres:shard:1", **job}, written=written)
    assert old == ["cpus-per-gpu=4294967296", "cpus-per-task=2", "gres=shard:1"], "up to 23.02 srun can be made to"


def test_fault_never_stops_the_command(hook: LuaHook) -> None:
    out = hook.chunk(
        """local options = setmetatable({}, { __index = function() error("boom") end })
        print(slurm_cli_pre_submit(options, 0) == slurm.SUCCESS)"""
    )
    assert out == "true\n"
