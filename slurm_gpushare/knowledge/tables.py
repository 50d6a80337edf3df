"""The CSV files of profiles and pairs: read once, strictly, into columns."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.rates import Floats
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import Row, read_rows, replacing

PERCENTAGES = ("gpu_util_mean_pct", "mem_access_mean_pct", "mgup", "mgmap", "mgtsamp")
MEMORY = ("mem_used_mib", "mem_total_mib")
TELEMETRY = PERCENTAGES + MEMORY
"""The measured columns that the knowledge part understands; an empty cell means "not known"."""

MAX_RATE = 2.0
"""A rate of 1.3 is a noisy measurement of 1; a rate of 50 is a percentage in the wrong column."""


@dataclass(frozen=True, slots=True)
class ProfileTable:
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

    def take(self, rows: Sequence[int]) -> ProfileTable:
        """Only these rows, in this order."""
        index = np.asarray(rows, dtype=np.intp)
        return ProfileTable(
            tuple(self.names[i] for i in rows),
            tuple(self.groups[i] for i in rows),
            self.gpu_model,
            {name: values[index] for name, values in self.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class PairTable:
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


def read_profiles(path: Path, gpu_model: str | None = None) -> ProfileTable:
    """Read a profiles file; `gpu_model` keeps only that model's rows, else there must be one model in it."""
    rows = read_rows(path, ("profile", "gpu_model"))
    rows = _one_gpu_model(path, rows, gpu_model)
    if not rows:
        raise BadInput(f"{path}: no profiles in it", "Give one row a profile below the header.")
    names = tuple(row.text("profile") for row in rows)
    _refuse_repeats(rows, names)
    groups = tuple(row.get("group") for row in rows)
    columns: dict[str, Floats] = {}
    for column in TELEMETRY:
        top = 100.0 if column in PERCENTAGES else math.inf
        values = np.array([row.number(column, 0.0, top) for row in rows])
        if not np.isnan(values).all():
            columns[column] = values
    _refuse_impossible_memory(rows, columns)
    return ProfileTable(names, groups, rows[0].get("gpu_model"), columns)


def read_pairs(
    path: Path,
    profiles: Iterable[str] | None = None,
    gpu_model: str | None = None,
    repeats: bool = False,
    clip: bool = True,
) -> PairTable:
    """Read a pairs file.

    `profiles`: the names that may appear, when they are known. `repeats`: the same pair may come more than once, in
    either order (observations do; a table of rates does not). Rates above 1 are noise and become 1 unless `clip` is
    false. A row that is not feasible, or has no rates, is kept with NaN rates.
    """
    rows = read_rows(path, ("profile_a", "profile_b", "gpu_model", "rate_a", "rate_b"))
    rows = _one_gpu_model(path, rows, gpu_model)
    if not rows:
        raise BadInput(f"{path}: no pairs in it", "Give one row a pair below the header.")
    known = None if profiles is None else set(profiles)
    a, b = (tuple(row.text(column) for row in rows) for column in ("profile_a", "profile_b"))
    for row, *pair in zip(rows, a, b, strict=True):
        if known is not None and (strangers := [name for name in pair if name not in known]):
            raise row.error(f"unknown profile '{strangers[0]}'", "Every name of a pair needs its profile.")
    rates = np.array([_pair_rates(row) for row in rows])
    if not repeats:
        _refuse_repeats(rows, [" beside ".join(sorted(pair)) for pair in zip(a, b, strict=True)])
    if clip:
        rates = np.minimum(rates, 1.0)
    return PairTable(a, b, rows[0].get("gpu_model"), ~np.isnan(rates[:, 0]), rates[:, 0], rates[:, 1])


def _pair_rates(row: Row) -> tuple[float, float]:
    """Both rates, NaN where the two cannot run together or were not measured."""
    rate_a, rate_b = row.number("rate_a", 0.0, MAX_RATE), row.number("rate_b", 0.0, MAX_RATE)
    if 0.0 in (rate_a, rate_b):
        raise row.error("a rate of 0", "Mark pairs that cannot run together with feasible = 0.")
    if math.isnan(rate_a) != math.isnan(rate_b):
        raise row.error("one rate is missing", "Give both, or neither with feasible = 0.")
    return (rate_a, rate_b) if _feasible(row) else (math.nan, math.nan)


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file by rename, so that a reader sees all of it or none."""
    with draft_of(path) as draft, draft.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_text(path: Path, text: str) -> None:
    """Write a text file by rename."""
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file to fill that takes the place of `path` in the end; what goes wrong is the fault of who named `path`."""
    if not path.parent.is_dir():
        raise BadInput(f"{path}: no directory {path.parent}", "Make it first.")
    try:
        with replacing(path) as draft:
            yield draft
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error


def _one_gpu_model(path: Path, rows: list[Row], wanted: str | None) -> list[Row]:
    models = sorted({row.text("gpu_model") for row in rows})
    if wanted is not None:
        if wanted not in models:
            raise BadInput(f"{path}: nothing of GPU model {wanted}", f"It has: {', '.join(models)}.")
        return [row for row in rows if row.get("gpu_model") == wanted]
    if len(models) > 1:
        raise BadInput(
            f"{path}: GPU models mixed: {', '.join(models)}",
            "Rates of one model say nothing about another: choose one with --gpu-model, or split the file.",
        )
    return rows


def _feasible(row: Row) -> bool:
    text = row.get("feasible") or "1"
    if text not in ("0", "1"):
        raise row.error(f"feasible is '{text}'", "Write 1 or 0.")
    return text == "1"


def _refuse_repeats(rows: Sequence[Row], names: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for row, name in zip(rows, names, strict=True):
        if name in seen:
            raise row.error(f"'{name}' again, first on line {seen[name]}", "Keep one of them.")
        seen[name] = row.line


def _refuse_impossible_memory(rows: Sequence[Row], columns: Mapping[str, Floats]) -> None:
    if not all(name in columns for name in MEMORY):
        return
    for row, used, total in zip(rows, columns["mem_used_mib"], columns["mem_total_mib"], strict=True):
        if used > total:
            raise row.error(f"mem_used_mib {used:g} is more than mem_total_mib {total:g}")
