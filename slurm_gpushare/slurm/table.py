"""Explicit columns in, rows out, whatever users write into their comments.

The delimiter is random for every call. A comment with bars, commas or line breaks, or one made to look
like a row of its own, can therefore never shift a column.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import islice

from slurm_gpushare.slurm.errors import SlurmError


def new_delimiter() -> str:
    """Never twice the same; letters, digits and ``~`` pass through every command's format option."""
    return f"~{secrets.token_hex(4)}~"


def format_option(columns: Sequence[str], delimiter: str) -> str:
    """The value of ``squeue -O`` and ``sinfo -O``; width 0 means as wide as the value."""
    return ",".join(f"{column}:0{delimiter}" for column in columns)


def _fields(output: str, delimiter: str) -> Iterator[str]:
    """The fields one by one: a list of them all would take several times the memory of the answer."""
    start, width = 0, len(delimiter)
    while (end := output.find(delimiter, start)) >= 0:
        yield output[start:end]
        start = end + width
    if output[start:].strip():
        raise _unreadable(f"it ends in '{output[start:].strip()[:40]}'")


def _unreadable(why: str) -> SlurmError:
    return SlurmError(f"cannot read Slurm's answer: {why}", "This Slurm release is not known.")


def rows(output: str, columns: Sequence[str], delimiter: str) -> Iterator[dict[str, str]]:
    """One dictionary a row; every column ends with the delimiter, every row with a line break after it."""
    fields = _fields(output, delimiter)
    while row := list(islice(fields, len(columns))):
        if len(row) < len(columns):
            raise _unreadable(f"its last row has {len(row)} of {len(columns)} fields")
        row[0] = row[0].lstrip("\n")
        yield dict(zip(columns, row, strict=True))
