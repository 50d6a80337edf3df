"""The CSV files of profiles and pairs: read once, strictly, into columns."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.errors import BadInput

Floats = NDArray[np.float64]

PERCENTAGES = ("gpu_util_mean_pct", "mem_access_mean_pct", "mgup", "mgmap", "mgtsamp")
MEMORY = ("mem_used_mib", "mem_total_mib")
TELEMETRY = PERCENTAGES + MEMORY
"""The measured columns that the knowledge part understands; an empty cell means "not known"."""

MAX_RATE = 2.0
"""A rate of 1.3 is a noisy measurement of 1; a rate of 50 is a percentage in the wrong column."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles by column. Telemetry that was not measured is NaN, and a column never measured is left out."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    """The family of each profile, for honest evaluation only; empty where the file does not say."""
    gpu_model: str
    columns: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.names)

    def column(self, name: str) -> Floats:
        """A telemetry column, all NaN when the file does not have it."""
        return self.columns[name] if name in self.columns else np.full(len(self.names), np.nan)

    def take(self, rows: Sequence[int]) -> Profiles:
        """Only these rows, in this order."""
        index = np.asarray(rows, dtype=np.intp)
        return Profiles(
            tuple(self.names[i] for i in rows),
            tuple(self.groups[i] for i in rows),
            self.gpu_model,
            {name: values[index] for name, values in self.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Measured pairs by column, one row a pair of jobs that ran together. Rates are NaN where not feasible."""

    profile_a: tuple[str, ...]
    profile_b: tuple[str, ...]
    gpu_model: str
    feasible: NDArray[np.bool_]
    rate_a: Floats
    """Speed of `profile_a` beside `profile_b`, as a share of its speed alone, at most 1."""
    rate_b: Floats

    def __len__(self) -> int:
        return len(self.profile_a)

    @property
    def names(self) -> list[str]:
        """Every profile that appears, sorted."""
        return sorted({*self.profile_a, *self.profile_b})


def read_profiles(path: Path, gpu_model: str | None = None) -> Profiles:
    """Read a profiles file; `gpu_model` keeps only that model's rows, else there must be one model in it."""
    rows = list(_rows(path, ("profile", "gpu_model")))
    rows = _one_gpu_model(path, rows, gpu_model)
    if not rows:
        raise BadInput(f"{path}: no profiles in it", "Give one row a profile below the header.")
    names = tuple(_name(path, line, row, "profile") for line, row in rows)
    _refuse_repeats(path, [line for line, _ in rows], names)
    groups = tuple((row.get("group") or "").strip() for _, row in rows)
    columns: dict[str, Floats] = {}
    for column in TELEMETRY:
        top = 100.0 if column in PERCENTAGES else math.inf
        values = np.array([_number(path, line, row, column, 0.0, top) for line, row in rows])
        if not np.isnan(values).all():
            columns[column] = values
    _refuse_impossible_memory(path, [line for line, _ in rows], columns)
    return Profiles(names, groups, rows[0][1]["gpu_model"].strip(), columns)


def read_pairs(
    path: Path,
    profiles: Iterable[str] | None = None,
    gpu_model: str | None = None,
    repeats: bool = False,
    clip: bool = True,
) -> Pairs:
    """Read a pairs file.

    `profiles`: the names that may appear, when they are known. `repeats`: the same pair may come more than once, in
    either order (observations do; a table of rates does not). Rates above 1 are noise and become 1 unless `clip` is
    false. A row that is not feasible, or has no rates, is kept with NaN rates.
    """
    rows = list(_rows(path, ("profile_a", "profile_b", "gpu_model", "rate_a", "rate_b")))
    rows = _one_gpu_model(path, rows, gpu_model)
    if not rows:
        raise BadInput(f"{path}: no pairs in it", "Give one row a pair below the header.")
    known = None if profiles is None else set(profiles)
    names: list[tuple[str, str]] = []
    rates: list[tuple[float, float]] = []
    feasible: list[bool] = []
    for line, row in rows:
        pair = _name(path, line, row, "profile_a"), _name(path, line, row, "profile_b")
        for name in pair:
            if known is not None and name not in known:
                raise BadInput(f"{path}:{line}: unknown profile '{name}'", "Every name of a pair needs its profile.")
        names.append(pair)
        both = tuple(_number(path, line, row, column, 0.0, MAX_RATE) for column in ("rate_a", "rate_b"))
        if 0.0 in both:
            raise BadInput(f"{path}:{line}: a rate of 0", "Mark pairs that cannot run together with feasible = 0.")
        if math.isnan(both[0]) != math.isnan(both[1]):
            raise BadInput(f"{path}:{line}: one rate is missing", "Give both, or neither with feasible = 0.")
        fits = _feasible(path, line, row) and not math.isnan(both[0])
        feasible.append(fits)
        rates.append((both[0], both[1]) if fits else (math.nan, math.nan))
    if not repeats:
        unordered = [" beside ".join(sorted(pair)) for pair in names]
        _refuse_repeats(path, [line for line, _ in rows], unordered)
    table = np.array(rates)
    if clip:
        table = np.minimum(table, 1.0)
    a, b = zip(*names, strict=True)
    return Pairs(a, b, rows[0][1]["gpu_model"].strip(), np.array(feasible), table[:, 0], table[:, 1])


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file by rename, so that a reader sees all of it or none."""

    def write(target: Path) -> None:
        with target.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)

    replace(path, write)


def write_text(path: Path, text: str) -> None:
    """Write a text file by rename."""
    replace(path, lambda draft: _fill(draft, text))


def _fill(draft: Path, text: str) -> None:
    draft.write_text(text, encoding="utf-8")


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then rename it over `path`."""
    if not path.parent.is_dir():
        raise BadInput(f"{path}: no directory {path.parent}", "Make it first.")
    draft = path.with_name(f".{path.name}.draft")
    try:
        write(draft)
        draft.replace(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def _rows(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or ()]
            if not header:
                raise BadInput(f"{path}: empty file", f"It needs a header with {', '.join(required)}.")
            if len(set(header)) < len(header):
                raise BadInput(f"{path}:1: a column is named twice", "Column names must differ.")
            missing = [name for name in required if name not in header]
            if missing:
                raise BadInput(f"{path}:1: no column {', '.join(missing)}", f"It has: {', '.join(header)}.")
            reader.fieldnames = header
            for row in reader:
                if None in row or None in row.values():
                    raise BadInput(f"{path}:{reader.line_num}: not {len(header)} cells", "The header says how many.")
                yield reader.line_num, row
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8: {error}") from error


def _one_gpu_model(
    path: Path, rows: list[tuple[int, dict[str, str]]], wanted: str | None
) -> list[tuple[int, dict[str, str]]]:
    for line, row in rows:
        _name(path, line, row, "gpu_model")
    models = sorted({row["gpu_model"].strip() for _, row in rows})
    if wanted is not None:
        if wanted not in models:
            raise BadInput(f"{path}: nothing of GPU model {wanted}", f"It has: {', '.join(models)}.")
        return [(line, row) for line, row in rows if row["gpu_model"].strip() == wanted]
    if len(models) > 1:
        raise BadInput(
            f"{path}: GPU models mixed: {', '.join(models)}",
            "Rates of one model say nothing about another: choose one with --gpu-model, or split the file.",
        )
    return rows


def _name(path: Path, line: int, row: Mapping[str, str], column: str) -> str:
    value = row[column].strip()
    if not value:
        raise BadInput(f"{path}:{line}: {column} is empty")
    return value


def _number(path: Path, line: int, row: Mapping[str, str], column: str, low: float, high: float) -> float:
    text = (row.get(column) or "").strip()
    if not text:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(
            f"{path}:{line}: {column} is '{text}', not a number", "Leave the cell empty when it is not known."
        )
    if not low <= value <= high:
        bounds = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise BadInput(f"{path}:{line}: {column} is {text}, but must be {bounds}")
    return value


def _feasible(path: Path, line: int, row: Mapping[str, str]) -> bool:
    text = (row.get("feasible") or "1").strip()
    if text not in ("0", "1"):
        raise BadInput(f"{path}:{line}: feasible is '{text}'", "Write 1 or 0.")
    return text == "1"


def _refuse_repeats(path: Path, lines: Sequence[int], names: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for line, name in zip(lines, names, strict=True):
        if name in seen:
            raise BadInput(f"{path}:{line}: '{name}' again, first on line {seen[name]}", "Keep one of them.")
        seen[name] = line


def _refuse_impossible_memory(path: Path, lines: Sequence[int], columns: Mapping[str, Floats]) -> None:
    if not all(name in columns for name in MEMORY):
        return
    for line, used, total in zip(lines, columns["mem_used_mib"], columns["mem_total_mib"], strict=True):
        if used > total:
            raise BadInput(f"{path}:{line}: mem_used_mib {used:g} is more than mem_total_mib {total:g}")
