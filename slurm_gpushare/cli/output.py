"""How commands print: aligned tables, ``---`` for the unknown, colour and progress only on a terminal."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from slurm_gpushare.cli.options import why_not_writable
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text

UNKNOWN = "---"

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and how its values are written."""

    name: str
    format: str = ""
    """A format specification for numbers, e.g. ``.1f``."""
    align: Literal["left", "right"] = "left"


def right(name: str, form: str = "") -> Column:
    """A column of numbers."""
    return Column(name, form, "right")


def text_of(value: Cell, spec: str = "") -> str:
    """A cell as people read it: the unknown is ``---``, never 0."""
    if value is None or value == "" or value != value:  # the last is NaN
        return UNKNOWN
    return value if isinstance(value, str) else format(value, spec)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, header: bool = True, delimiter: str | None = None
) -> str:
    """Rows as aligned columns, or separated by `delimiter` (squeue's and sacct's -P) without padding."""
    lines = [[text_of(value, column.format) for column, value in zip(columns, row, strict=True)] for row in rows]
    if header:
        lines.insert(0, [column.name for column in columns])
    if delimiter is not None:
        return "\n".join(delimiter.join(line) for line in lines)
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    aligned = (
        "  ".join(
            word.rjust(width) if column.align == "right" else word.ljust(width)
            for word, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join(aligned)


def wrapped(sentence: str) -> str:
    """A sentence in lines of at most 80 columns."""
    return textwrap.fill(sentence, 80, break_on_hyphens=False, break_long_words=False)


def echo_json(data: Any) -> None:
    """Print `data` for scripts: one JSON document, stable key order."""
    click.echo(json.dumps(data, indent=2, sort_keys=True, allow_nan=False))


def echo_models(documents: Sequence[dict[str, Any]]) -> None:
    """Print the first GPU model's document; where there are several, all of them are in it under ``models``."""
    echo_json(documents[0] | ({"models": documents} if len(documents) > 1 else {}))


def use_colour() -> bool:
    """Colour only for a person at a terminal who has not declined it (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, colour: str) -> str:
    """`text` in `colour` where colour is in use, else as it is."""
    return click.style(text, fg=colour) if use_colour() else text


def warn(message: str) -> None:
    """One line on stderr that does not stop the command."""
    click.echo(f"gpushare: warning: {' '.join(message.split())}", err=True)


class _Silent:
    """A bar that nobody sees."""

    def update(self, n_steps: int) -> None:
        """Nothing to show."""


@contextmanager
def progress(label: str, length: int) -> Iterator[Any]:
    """A bar on stderr for work over about two seconds; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar


# Pages that commands write: can they be, and may they replace what is there?


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
