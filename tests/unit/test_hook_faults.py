"""Whatever breaks, the job goes on as its user wrote it, and the log gets a line."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, KNOWN, OTHERS, ROOT, UNKNOWN, LuaHook, literal, make_hook

JOB = f'{{comment="gpushare:{KNOWN}", tres_per_job="gres/gpu:1"}}'
# Time passes for the hook only when the test says so.
CLOCK = """
local now = os.time()
os.time = function() return now end
local function wait(seconds) now = now + seconds end
"""


@pytest.fixture(params=INTERPRETERS)
def hook(request: pytest.FixtureRequest, tmp_path: Path) -> LuaHook:
    return make_hook(request.param, tmp_path)


def test_missing_or_bad_configuration(hook: LuaHook) -> None:
    hook.conf.unlink()
    answer = hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert (answer.code, answer.fields) == (0, {})
    assert "gpushare.conf" in answer.logged[0]
    hook.configure(LeaseSeconds="soon")
    answer = hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert (answer.code, answer.fields) == (0, {})
    assert "leaseseconds" in answer.logged[0]


def test_a_broken_configuration_leaves_the_last_good_one_in_force_and_says_so(hook: LuaHook) -> None:
    first, second, third = hook.answers(
        f"""{CLOCK} run.submit({JOB})
        local file = io.open("{hook.conf}", "a"); file:write("Partitoins=gpu\\n"); file:close()
        wait(1); run.submit({JOB})
        os.remove("{hook.conf}")
        wait(1); run.submit({JOB})"""
    )
    assert first.fields.keys() == second.fields.keys() == third.fields.keys()
    assert "bad line: Partitoins=gpu; the last good settings stay in force" in second.logged[0]


def test_an_emptied_configuration_leaves_the_last_good_one_in_force_and_says_so(hook: LuaHook) -> None:
    first, second = hook.answers(
        f"""{CLOCK} run.submit({JOB})
        local file = io.open("{hook.conf}", "w"); file:write("# of the site\\n"); file:close()
        wait(1); run.submit({JOB})"""
    )
    assert first.fields.keys() == second.fields.keys()
    assert "there is no setting in it; the last good settings stay in force" in second.logged[0]


def test_a_hook_that_starts_with_a_broken_configuration_takes_the_copy_of_the_last_good_one(hook: LuaHook) -> None:
    copy = f"# last good settings of {hook.conf}\n{hook.conf.read_text()}"
    hook.conf.write_text("Partitoins=gpu\n")
    hook.last_good.write_text(copy)
    assert hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1").fields
    hook.last_good.write_text(copy.replace(str(hook.conf), "/another/site/gpushare.conf", 1))
    assert not hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1").fields


def test_changed_configuration_is_noticed_within_a_second(hook: LuaHook) -> None:
    first, second = hook.answers(
        f"""{CLOCK} run.submit({JOB})
        local file = io.open("{hook.conf}"); local text = file:read("*a"); file:close()
        file = io.open("{hook.conf}", "w"); file:write((text:gsub("Partitions=%S*", "Partitions=none"))); file:close()
        wait(1); run.submit({JOB})"""
    )
    assert first.fields
    assert second.untouched


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_nothing_is_converted_while_the_helper_sees_another_slurm_than_configure_did(
    hook: LuaHook, version: str
) -> None:
    hook.configure(SlurmVersion=version)
    hook.hook_file.unlink()
    hook.write_hook_file(gangs=-1)
    tagged = hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert tagged.fields == {}
    assert "Slurm was upgraded" in tagged.said[0]
    assert hook.submit(tres_per_job="gres/gpu:1").untouched
    assert hook.submit(tres_per_job="gres/gpu:v100:1").fields == {"tres_per_job": "gres/gpu:1", "features": "v100"}


def damage(hook: LuaHook, how: str) -> None:
    path = hook.hook_file
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "not a database":
        path.write_bytes(b"x" * 8192)
    elif how == "corrupt":
        content = bytearray(path.read_bytes())
        content[4096:] = os.urandom(len(content) - 4096)
        path.write_bytes(content)
    elif how == "a directory":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "not a database", "corrupt", "a directory"])
def test_damaged_hook_file_costs_only_sharing(hook: LuaHook, how: str) -> None:
    damage(hook, how)
    answer = hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert (answer.code, answer.fields) == (0, {})
    assert "not available" in answer.said[0]
    assert len(answer.logged) == 1
    if how == "missing":
        assert not hook.hook_file.exists()  # read-only: nothing is created


def test_locked_hook_file_does_not_hold_up_slurmctld(hook: LuaHook) -> None:
    with closing(sqlite3.connect(hook.hook_file, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        answer = hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert (answer.code, answer.fields) == (0, {})
    assert "locked" in answer.logged[0]


def test_replaced_moved_and_broken_files_are_noticed_by_a_running_hook(hook: LuaHook) -> None:
    other = hook.directory / "other.sqlite"
    hook.write_hook_file(other, cluster=7)
    path = hook.hook_file
    answers = hook.answers(
        f"""
        local job = {JOB}
        run.submit(job)
        os.rename("{other}", "{path}"); run.submit(job)      -- replaced
        os.rename("{path}", "{other}"); run.submit(job)      -- moved away
        os.rename("{other}", "{path}"); run.submit(job)      -- and back
        local file = io.open("{path}", "r+"); local good = file:read("*a")
        file:seek("set", 0); file:write(string.rep("x", #good)); file:close()
        run.submit(job)                      -- spoilt
        file = io.open("{path}", "w"); file:write(good); file:close()
        run.submit(job)                      -- and whole again
        """
    )
    clusters = [answer.fields.get("admin_comment", "-").partition(";")[0] for answer in answers]
    assert clusters == ["GS1:c=2", "GS1:c=7", "-", "GS1:c=7", "-", "GS1:c=7"]
    assert all(answer.code == 0 for answer in answers)


def test_hook_never_writes_its_file(hook: LuaHook) -> None:
    before = hook.hook_file.read_bytes()
    hook.submit(comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert hook.hook_file.read_bytes() == before
    assert sorted(path.name for path in hook.directory.iterdir()) == [
        "cases.lua", "gpushare.conf", "gpushare.generated.conf", "hook.sqlite",
    ]  # fmt: skip
    refused = hook.chunk(
        f"""local store = run.load("gpushare_share")
        store.look_up("{hook.hook_file}", "{KNOWN}")
        local name, open, i = nil, nil, 0
        repeat
          i = i + 1
          name, open = debug.getupvalue(store.look_up, i)
        until name == "open"
        print(open("{hook.hook_file}"):execute("DELETE FROM workload"))"""
    )
    assert "readonly" in refused


def test_missing_luasql_costs_only_sharing(hook: LuaHook) -> None:
    (answer,) = hook.answers(
        f'package.preload["luasql.sqlite3"] = function() error("no such module") end run.submit({JOB})'
    )
    assert (answer.code, answer.fields) == (0, {})
    assert "no such module" in answer.logged[0]


@pytest.mark.parametrize("field", ["admin_comment", "begin_time", "tres_per_node", "tres_per_job"])
def test_job_is_put_back_if_a_field_cannot_be_written(hook: LuaHook, field: str) -> None:
    answer = hook.submit(fail_on=field, comment=f"gpushare:{KNOWN}", tres_per_job="gres/gpu:1")
    assert (answer.code, answer.fields) == (0, {})
    assert "cannot write" in answer.logged[0]


def test_fault_of_ours_never_refuses_a_job(hook: LuaHook) -> None:
    (answer,) = hook.answers(f'run.load("gpushare_gpus").single = function() error("boom") end run.submit({JOB})')
    assert (answer.code, answer.fields) == (0, {})
    assert "boom" in answer.logged[0]


def test_log_has_one_line_a_minute_for_a_fault_of_every_submission(hook: LuaHook) -> None:
    hook.hook_file.unlink()
    answers = hook.answers(f"{CLOCK} for i = 1, 100 do run.submit({JOB}) end wait(61) run.submit({JOB})")
    assert [len(answer.logged) for answer in answers[:100]] == [1] + [0] * 99
    assert len(answers[100].logged) == 1


def test_twenty_thousand_random_jobs_raise_nothing_and_change_no_untagged_job(hook: LuaHook) -> None:
    tokens = literal({"known": KNOWN, "others": OTHERS, "unknown": UNKNOWN})
    fuzz = ROOT / "tests/unit/hook_fuzz.lua"
    cases = 20_000 if hook.interpreter == "lua5.4" else 4_000  # the others are slower
    assert hook.chunk(f'dofile("{fuzz}")(run, {tokens}, 7, {cases})') == "done\n"
