"""The environment of a testbed's daemons, of its jobs, and of the commands that people run in it."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path

from gpushare_lab.testbed.layout import MARKER, Layout
from slurm_gpushare.protocol.errors import BadInput, GpushareError

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def closed_directory() -> Path | None:
    """The first directory on the way to this installation that only its owner can enter; /root is one."""
    return next((path for path in reversed(Path(sys.prefix).parents) if not path.stat().st_mode & 0o001), None)


def daemon_env(layout: Layout) -> dict[str, str]:
    """What every process of the testbed has in its environment."""
    return {
        MARKER: str(layout.root),
        "SLURM_CONF": str(layout.slurm_conf),
        "GPUSHARE_CONF": str(layout.gpushare_conf),
        "GPUSHARE_LAST_GOOD": str(layout.gpushare / "gpushare.conf.good"),
        "GPUSHARE_EMU_DIR": str(layout.emu),
        "LD_LIBRARY_PATH": str(layout.lib),
        "MYSQL_UNIX_PORT": str(layout.mariadb_socket),
        "PATH": f"{layout.bin}:{Path(sys.executable).parent}:{_SYSTEM_PATH}",
    }


def command_env(layout: Layout) -> dict[str, str]:
    """This process's environment, inside the testbed; what an outer Slurm job set is left out."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
    return {**outer, **daemon_env(layout)}


def make_home(layout: Layout, user: str) -> tuple[pwd.struct_passwd, Path]:
    """The user, and a home of theirs inside the testbed, made now if there is none."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise BadInput(f"testbed: no user '{user}' on this machine") from None
    home = layout.home / user
    if not home.exists():
        home.mkdir()
        os.chown(home, entry.pw_uid, entry.pw_gid)
    return entry, home


def user_command(
    layout: Layout, command: Sequence[str], user: str | None, enter: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """argv and environment that run `command` as `user`, with a home of their own inside the testbed.

    `enter` is what leads into the testbed's root file system, if it has one.
    """
    env = command_env(layout)
    if user is None:
        return [*enter, *command], env
    if user != "root" and (closed := closed_directory()):
        raise GpushareError(
            f"testbed: {user} cannot run gpushare from {sys.prefix}: {closed} is closed to others",
            "Install or clone it elsewhere, e.g. in /opt.",
        )
    entry, home = make_home(layout, user)
    env |= {"HOME": str(home), "USER": user, "LOGNAME": user}
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        env.pop(name, None)
    argv = [*enter, "setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", "--", *command]
    return argv, env
