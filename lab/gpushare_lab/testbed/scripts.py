"""The small shell and Lua files of a testbed that lead from Slurm to this repository's own files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from gpushare_lab.testbed.layout import Layout, Shape
from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.site.site_files import SCRIPTS, lua_script


def write_scripts(layout: Layout, env: Mapping[str, str], shape: Shape) -> None:
    """Prolog, epilog, task prolog, job_submit.lua and cli_filter.lua."""
    prolog_dir = resource_dir("prolog")
    of_root = {**env, "GPUSHARE_PYTHON": sys.executable}
    for name in ("prolog.sh", "epilog.sh", "epilog_slurmctld.sh"):
        write_executable(layout.etc / name, script_with_environment(of_root, prolog_dir / name))
    write_executable(layout.etc / "task_prolog.sh", _task_prolog(env, prolog_dir / "task_prolog"))
    lua_dir = resource_dir("lua_bridge")
    models = {model: (",".join(shape.nodes_of(model)), shape.gpus) for model in shape.models}
    for name in SCRIPTS:
        (layout.etc / name).write_text(lua_script(lua_dir, name, models))


def write_munge_commands(layout: Layout) -> None:
    for command in ("munge", "unmunge", "remunge"):
        # Nothing else tells these commands which socket to use, and they must not meet the machine's own.
        write_executable(
            layout.bin / command,
            f'#!/bin/sh\nexec /usr/bin/{command} --socket={shlex.quote(str(layout.munge_socket))} "$@"\n',
        )


def script_with_environment(env: Mapping[str, str], script: Path, before: str = "") -> str:
    """A script that sets the environment, does what `before` says, and becomes the repository's script."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    last = f"exec {shlex.quote(str(script))}\n"
    kept = f"export GPUSHARE_KEEP_ENV={shlex.quote(' '.join(['GPUSHARE_EMU_NODE', *env]))}\n"
    return f'#!/bin/sh\n{exports}{kept}export GPUSHARE_EMU_NODE="$SLURMD_NODENAME"\n{before}{last}'


def _task_prolog(env: Mapping[str, str], script: Path) -> str:
    """What it prints as ``export NAME=VALUE`` becomes the task's environment, also under --export=NONE."""
    prints = "".join(f"echo {shlex.quote(f'export {name}={value}')}\n" for name, value in env.items())
    return script_with_environment(env, script, before=prints)


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
