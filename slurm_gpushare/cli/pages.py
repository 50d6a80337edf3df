"""Pages that commands write: can they be, and may they replace what is there?"""

from __future__ import annotations

import os
from pathlib import Path

from slurm_gpushare.atomic_files import replace_text
from slurm_gpushare.cli.checks import why_not_writable
from slurm_gpushare.errors import BadInput, GpushareError


def check_page(path: Path, force: bool) -> None:
    """Before anything is asked of Slurm: can the page be written where it is wanted?"""
    try:
        there = path.exists()
    except OSError as why:
        raise GpushareError(f"{path}: cannot be written: {why.strerror}") from why
    if there and not force:
        raise BadInput(f"{path}: exists already", "Name another file, or add --force.")
    if not path.parent.is_dir():
        why_not: str | None = "there is no such directory"
    elif there and not path.is_file():  # a terminal, a pipe
        why_not = None if os.access(path, os.W_OK) else "Permission denied"
    else:
        why_not = why_not_writable(path.resolve().parent)
    if why_not:
        raise GpushareError(f"{path}: cannot be written: {why_not}", "Name another file.")


def write_page(path: Path, text: str) -> None:
    """Write the page, for its owner alone: it names users and their jobs. Who may read it is for the owner to say."""
    try:
        if path.is_file() or not path.exists():
            replace_text(path.resolve(), text, 0o600)
        else:
            path.write_text(text, encoding="utf-8")  # a terminal, a pipe
    except OSError as why:
        raise GpushareError(f"{path}: cannot be written: {why.strerror}") from why
