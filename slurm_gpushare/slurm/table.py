"""Explicit columns in, rows out, whatever users write into their comments.

The delimiter is random for every call and nobody else can read it: squeue gets it in its environment, since every
user of the machine can read a command line. A comment with bars, commas or line breaks, or one made to look like a row
of its own, can therefore never shift a column.

sacct takes a delimiter on its command line alone. But it prints times as its environment says, so each of its rows
begins with a time that carries a second random word, which only its own user can read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from slurm_gpushare.slurm.errors import SlurmError


def new_delimiter() -> str:
    """128 random bits. Letters, digits and ``~_-`` pass through every command's format option."""
    return f"~{secrets.token_urlsafe(16)}~"


def time_format(mark: str) -> dict[str, str]:
    """A setting of sacct's environment: unix times with `mark` before them. Slurm takes formats of up to 31 letters."""
    return {"SLURM_TIME_FORMAT": f"{mark}%s"}


def format_option(columns: Sequence[str], delimiter: str) -> str:
    """The value of ``squeue -O`` and ``sinfo -O``; width 0 means as wide as the value."""
    return ",".join(f"{column}:0{delimiter}" for column in columns)


def _unreadable(why: str) -> SlurmError:
    return SlurmError(f"cannot read Slurm's answer: {why}", "This Slurm release is not known.")


def value_rows(output: str, width: int, delimiter: str) -> Iterator[list[str]]:
    """The values of each row; every column ends with the delimiter, every row with a line break after it.

    Row by row: a list of all fields would take several times the memory of the answer.
    """
    start, row_end = 0, f"{delimiter}\n"
    output = output if output.endswith("\n") else f"{output}\n"
    while (end := output.find(row_end, start)) >= 0:
        row = output[start:end].split(delimiter)
        while len(row) < width and (end := output.find(row_end, end + len(row_end))) >= 0:
            row = output[start:end].split(delimiter)  # that was no row's end: a value begins with a line break
        if len(row) != width:
            break
        yield row
        start = end + len(row_end)
    if rest := output[start:].replace(delimiter, " ").strip():
        raise _unreadable(f"no row of {width} fields in '{rest[:40]}'")


def rows(output: str, columns: Sequence[str], delimiter: str) -> Iterator[dict[str, str]]:
    """One dictionary a row."""
    for row in value_rows(output, len(columns), delimiter):
        yield dict(zip(columns, row, strict=True))


def marked_rows(output: str, columns: Sequence[str], delimiter: str, mark: str) -> Iterator[dict[str, str]]:
    """The rows of an answer whose first column is a time that begins with `mark`, as all times in it do.

    Nobody but us knows the mark, so no text makes a row of its own. Who knows the delimiter can make the columns of
    their own row too many: that row is left out.
    """
    start, row_start = 0, f"\n{mark}"
    output = f"\n{output}"
    end = output.find(row_start)
    if rest := output[: end if end >= 0 else len(output)].replace(delimiter, " ").strip():
        raise _unreadable(f"no row in '{rest[:40]}'")
    while end >= 0:
        start = end + len(row_start)
        end = output.find(row_start, start)
        row = output[start : end if end >= 0 else len(output)].removesuffix("\n").removesuffix(delimiter)
        values = row.replace(mark, "").split(delimiter)
        if len(values) < len(columns):
            raise _unreadable(f"no row of {len(columns)} fields in '{' '.join(values)[:40]}'")
        if len(values) == len(columns):
            yield dict(zip(columns, values, strict=True))
