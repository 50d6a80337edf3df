"""CSV files as people hand them to us: a header, then rows that have all of its columns, or one clear line of refusal.

Without numpy: emulated jobs read their pairs here too, dozens at once on a small machine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.errors import BadInput


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def get(self, column: str) -> str:
        """The cell without surrounding blanks; empty where the file has no such column."""
        return self.cells.get(column, "").strip()

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        if value := self.get(column):
            return value
        raise self.error(f"{column} is empty")

    def number(self, column: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number within bounds; NaN where the cell is empty or the column absent."""
        text = self.get(column)
        if not text:
            return math.nan
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(f"{column} is '{text}', not a number", "Leave the cell empty when it is not known.")
        if not low <= value <= high:
            bounds = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise self.error(f"{column} is {text}, but must be {bounds}")
        return value

    def error(self, what: str, hint: str = "") -> BadInput:
        return BadInput(f"{self.path}:{self.line}: {what}", hint)


def read_rows(path: Path, required: Sequence[str]) -> list[Row]:
    """All rows of a file whose header has at least the `required` columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            return _read(path, csv.DictReader(stream, skipinitialspace=True), required)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8: {error}") from error


def _read(path: Path, reader: csv.DictReader[str], required: Sequence[str]) -> list[Row]:
    header = [name.strip() for name in reader.fieldnames or ()]
    if not header:
        raise BadInput(f"{path}: empty file", f"It needs a header with {', '.join(required)}.")
    if len(set(header)) < len(header):
        raise BadInput(f"{path}:1: a column is named twice", "Column names must differ.")
    if missing := [name for name in required if name not in header]:
        raise BadInput(f"{path}:1: no column {', '.join(missing)}", f"It has: {', '.join(header)}.")
    reader.fieldnames = header
    rows = []
    for cells in reader:
        if None in cells or None in cells.values():
            raise BadInput(f"{path}:{reader.line_num}: not {len(header)} cells", "The header says how many.")
        rows.append(Row(path, reader.line_num, cells))
    return rows
