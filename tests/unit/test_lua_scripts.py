"""job_submit.lua and cli_filter.lua as `gpushare configure` writes them: they need no other file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from lua_hook import INTERPRETERS, ROOT

from slurm_gpushare.site.site_files import SCRIPTS, lua_script

SLURM = """
slurm = {
  SUCCESS = 0, ERROR = -1, ESLURM_ACCESS_DENIED = 2002, NO_VAL = 4294967294, NO_VAL16 = 65534,
  NO_VAL64 = 18446744073709551614.0, log_error = function() end, log_user = function() end,
}
"""
SUBMIT = """
local parts = { gpu = { flag_default = 1, nodes = "gpu[0-3]" } }
local job = { tres_per_node = "gres/gpu:v100:1", partition = "gpu" }
print(slurm_job_submit(job, parts, 1000), job.tres_per_node, job.features)
print(slurm_job_modify({ tres_per_node = "xgres:shard:1" }, { partition = "gpu" }, parts, 1000))
"""
FILTER = """
local options = { type = "srun", gpus = "v100:1" }
print(slurm_cli_setup_defaults(options, false), slurm_cli_pre_submit(options, 0), slurm_cli_post_submit(0, 1, 1))
print(options.gpus, options.constraint)
"""


@pytest.fixture(params=INTERPRETERS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """Runs the script `name` alone in a directory, after `before` and before `after`; what it prints, in words."""
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param}")

    def chunk(name: str, before: str, after: str) -> list[str]:
        (tmp_path / name).write_text(lua_script(ROOT / "lua_bridge", name, {"v100": ("gpu[0-1]", 2)}))
        (tmp_path / "main.lua").write_text(f'{SLURM}{before}dofile("{tmp_path}/{name}")\n{after}')
        done = subprocess.run(
            [request.param, str(tmp_path / "main.lua")],
            env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return chunk


def test_hook_rewrites_models_without_any_other_file(run: object) -> None:
    assert callable(run)
    rc, request, features, refused = run("job_submit.lua", "", SUBMIT)
    assert (float(rc), request, features, float(refused)) == (0, "gres/gpu:1", "v100", 2002)


def test_filter_rewrites_models_without_any_other_file(run: object) -> None:
    assert callable(run)
    assert [float(word) for word in run("cli_filter.lua", "", FILTER)[:3]] == [0, 0, 0]
    assert run("cli_filter.lua", "", FILTER)[3:] == ["1", "v100"]


def test_sites_own_functions_come_first(run: object) -> None:
    assert callable(run)
    refuse = "function slurm_job_submit(job) job.tres_per_node = 'theirs' return -1 end\n"
    rc, request, features, _ = run("job_submit.lua", refuse, SUBMIT)
    assert (float(rc), request, features) == (-1, "theirs", "nil")
    accept = "function slurm_job_submit(job) job.features = 'theirs' end\n"
    rc, request, features, _ = run("job_submit.lua", accept, SUBMIT)
    assert (float(rc), request, features) == (0, "gres/gpu:1", "theirs&v100")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_module_that_is_loaded_is_in_the_script(name: str) -> None:
    text = lua_script(ROOT / "lua_bridge", name, {})
    wanted = {line.split('load("')[1].split('"')[0] for line in text.splitlines() if 'load("' in line}
    assert wanted <= set(SCRIPTS[name])
