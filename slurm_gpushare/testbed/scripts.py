"""The small shell and Lua files of a testbed that lead from Slurm to this repository's own files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from slurm_gpushare.resources import resource_dir
from slurm_gpushare.testbed.layout import Layout

_ACCEPT_ALL_LUA = """\
function slurm_job_submit(job_desc, part_list, submit_uid) return slurm.SUCCESS end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def write_scripts(layout: Layout, env: Mapping[str, str]) -> None:
    """Prolog, epilog, task prolog, job_submit.lua, cli_filter.lua and the munge commands."""
    prolog_dir = resource_dir("prolog")
    for name in ("prolog", "epilog"):
        _executable(layout.etc / f"{name}.sh", _wrapper(env, find_script(prolog_dir, name)))
    _executable(layout.etc / "task_prolog.sh", _task_prolog(env, find_script(prolog_dir, "task_prolog")))
    lua_dir = resource_dir("lua_bridge")
    (layout.etc / "job_submit.lua").write_text(_lua(lua_dir, "job_submit.lua") or _ACCEPT_ALL_LUA)
    if cli_filter := _lua(lua_dir, "cli_filter.lua"):
        (layout.etc / "cli_filter.lua").write_text(cli_filter)
    for command in ("munge", "unmunge", "remunge"):
        # Nothing else tells these commands which socket to use, and they must not meet the machine's own.
        _executable(
            layout.bin / command,
            f'#!/bin/sh\nexec /usr/bin/{command} --socket={shlex.quote(str(layout.munge_socket))} "$@"\n',
        )


def find_script(directory: Path, name: str) -> Path | None:
    """The repository's script, whether it is called NAME or NAME.sh."""
    for candidate in (directory / f"{name}.sh", directory / name):
        if candidate.is_file():
            return candidate
    return None


def _wrapper(env: Mapping[str, str], script: Path | None, before: str = "") -> str:
    """A script that sets the environment, does what `before` says, and becomes the repository's script."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    last = f"exec {shlex.quote(str(script))}\n" if script else "exit 0\n"
    return f'#!/bin/sh\n{exports}export GPUSHARE_EMU_NODE="$SLURMD_NODENAME"\n{before}{last}'


def _task_prolog(env: Mapping[str, str], script: Path | None) -> str:
    """What it prints as ``export NAME=VALUE`` becomes the task's environment, also under --export=NONE."""
    prints = "".join(f"echo {shlex.quote(f'export {name}={value}')}\n" for name, value in env.items())
    return _wrapper(env, script, before=prints)


def _lua(directory: Path, name: str) -> str | None:
    if not (directory / name).is_file():
        return None
    return f'package.path = "{directory}/?.lua;" .. package.path\nreturn dofile("{directory / name}")\n'


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
