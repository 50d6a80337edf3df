"""Explicit columns in, rows out, whatever users write into their comments.

The delimiter is random for every call. A comment with bars, commas or line breaks, or one made to look
like a row of its own, can therefore never shift a column.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from slurm_gpushare.slurm.errors import SlurmError


def new_delimiter() -> str:
    """Never twice the same; letters, digits and ``~`` pass through every command's format option."""
    return f"~{secrets.token_hex(4)}~"


def format_option(columns: Sequence[str], delimiter: str) -> str:
    """The value of ``squeue -O`` and ``sinfo -O``; width 0 means as wide as the value."""
    return ",".join(f"{column}:0{delimiter}" for column in columns)


def rows(output: str, columns: Sequence[str], delimiter: str) -> list[dict[str, str]]:
    """One dictionary a row; every column ends with the delimiter, every row with a line break after it."""
    fields = output.split(delimiter)
    tail = fields.pop()
    width = len(columns)
    if len(fields) % width or tail.strip():
        raise SlurmError(
            f"cannot read Slurm's answer: {len(fields)} fields in rows of {width}", "This Slurm release is not known."
        )
    result = []
    for first in range(0, len(fields), width):
        row = fields[first : first + width]
        row[0] = row[0].lstrip("\n")
        result.append(dict(zip(columns, row, strict=True)))
    return result
