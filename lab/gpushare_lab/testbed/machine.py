"""What a testbed needs of the machine that it runs on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from gpushare_lab.testbed.environment import closed_directory
from gpushare_lab.testbed.layout import SLURM_USER, Progress
from slurm_gpushare.protocol.errors import GpushareError

_NEEDED_MIB = 300  # 90 MiB at the start, most of it MariaDB's, and room for logs


def check_space(directory: Path) -> None:
    free_mib = shutil.disk_usage(directory).free >> 20
    if free_mib < _NEEDED_MIB:
        raise GpushareError(f"{directory}: {free_mib} MiB free, a testbed needs {_NEEDED_MIB}", "Choose another --dir.")


def choose_slurm_user(progress: Progress) -> str:
    """An ordinary system user, as everywhere; root where nobody else can read this installation."""
    if closed := closed_directory():
        progress(f"SlurmUser is root, since {closed} is closed to {SLURM_USER}: 'scripts/readable.sh COMMAND' opens it")
        return "root"
    return SLURM_USER


def slurm_release(root: Path | None) -> str:
    argv = ["slurmctld", "-V"] if root is None else ["chroot", str(root), "/usr/sbin/slurmctld", "-V"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]
    except (OSError, subprocess.CalledProcessError) as why:
        raise GpushareError(f"testbed: no slurmctld: {why}", "Run scripts/setup.sh.") from why
