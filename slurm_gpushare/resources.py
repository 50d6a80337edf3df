"""Where the files live that are not Python: Lua, SQL, prolog scripts, units, man pages."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def resource_dir(name: str) -> Path:
    """The directory of ``lua_bridge``, ``prolog``, ``share`` or ``sql``, in a checkout or an installed wheel.

    Daemons outside Python read these files, so they must be real paths; wheels are always
    unpacked on installation, which makes them so.
    """
    return Path(str(files(f"slurm_gpushare.{name}")))
