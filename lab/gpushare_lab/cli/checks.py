"""Checks of options before a long run."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import why_not_writable


def check_counts(gpus: int, jobs: int | None) -> None:
    if gpus < 1:
        raise BadInput(f"--gpus {gpus}: at least one is needed")
    if jobs is not None and jobs < 1:
        raise BadInput(f"--jobs {jobs}: at least one is needed")


def check_new_directory(option: str, path: Path) -> None:
    """Before a long run: can this directory be made, unless it is there, and written to?"""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if why := why_not_writable(there):
        raise BadInput(f"{option} {path}: cannot be written to: {why}", "Name another directory.")
