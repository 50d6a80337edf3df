"""The filter in the user's own commands: names become tokens, and steps fit a job that has shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, ROOT, LuaHook, literal, make_hook

from slurm_gpushare.tokens import TokenFile


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


def filtered(hook: LuaHook, comment: str) -> tuple[str, str]:
    """The comment that leaves the user's side, and what the user is told."""
    out = hook.chunk(
        f"""local client = dofile("{ROOT}/lua_bridge/gpushare_cli.lua")
        local options = {{ type = "sbatch", comment = {literal(comment)} }}
        assert(client.pre_submit(options, 0) == slurm.SUCCESS)
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


def test_token_and_other_comments_pass_as_they_are(hook: LuaHook) -> None:
    for comment in (f"gpushare:gs-{'a' * 20}", f"gpushare:gs-{'a' * 20},max=3 x", "nothing of ours", "gpushare:"):
        assert filtered(hook, comment) == (comment, "")


def test_name_without_a_token_never_leaves_the_users_side(hook: LuaHook) -> None:
    kept, told = filtered(hook, "gpushare:secret-project,max=10")
    assert kept == "gpushare:?,max=10"
    assert "gpushare token" in told


def step(hook: LuaHook, options: dict[str, str]) -> dict[str, str] | None:
    out = hook.chunk(
        f"""local client = dofile("{ROOT}/lua_bridge/gpushare_cli.lua")
        local options = {literal(options)}
        local wanted = client.step_options(function(name) return options[name] end, "2")
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


def test_fault_never_stops_the_command(hook: LuaHook) -> None:
    out = hook.chunk(
        f"""local client = dofile("{ROOT}/lua_bridge/gpushare_cli.lua")
        local options = setmetatable({{}}, {{ __index = function() error("boom") end }})
        print(client.pre_submit(options, 0) == slurm.SUCCESS)"""
    )
    assert out == "true\n"
