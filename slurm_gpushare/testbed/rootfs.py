"""Root file systems of other Debian releases, for the Slurm releases in them; made once, kept in a cache."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.errors import BadInput


@dataclass(frozen=True)
class Suite:
    """A Debian release and the debootstrap script that can make it."""

    name: str
    script: str | None = None  # None: the one of the same name


SUITES = {
    suite.name: suite
    for suite in (
        Suite("bookworm"),  # Slurm 22.05
        Suite("trixie"),  # 24.11
        Suite("forky", script="sid"),  # 26.05; older debootstraps do not know it
    )
}


def cache_dir() -> Path:
    """Where root file systems are kept: outside any repository; ``GPUSHARE_CACHE`` overrides."""
    if explicit := os.environ.get("GPUSHARE_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slurm-gpushare"


def host_suite() -> str:
    """The Debian release of this machine, whose packages need no root file system."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def check_suite(name: str) -> str:
    if name not in SUITES:
        raise BadInput(f"testbed: no Debian release '{name}'", f"Choose one of {', '.join(SUITES)}.")
    return name
