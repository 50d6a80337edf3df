"""The jobs and the measured pairs of a simulation, read once and checked."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.files import read_pairs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pairs:
    """How fast each profile runs beside each other one. NaN: the two cannot share."""

    profiles: tuple[str, ...]  # sorted
    rate: Floats  # row: the job, column: its neighbour

    def capped(self, isd_pct: float) -> Pairs:
        """The same without the pairs that slow either job by more than `isd_pct`."""
        floor = 1.0 / (1.0 + isd_pct / 100.0)
        with np.errstate(invalid="ignore"):
            keep = self.rate >= floor
        return Pairs(self.profiles, np.where(keep & keep.T, self.rate, np.nan))


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in submit order."""

    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints


@dataclass(frozen=True, slots=True)
class Workload:
    """What one simulation runs: jobs with their profiles, on `gpus` equal cards."""

    gpus: int
    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints
    profile: Ints  # index into pairs.profiles
    pairs: Pairs
    seed: int

    @property
    def jobs(self) -> int:
        return len(self.submit_s)


def _rows(path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a CSV file with their place (``file:line``), once the header has what is wanted."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in wanted if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(f"{path}: no column {', '.join(missing)}", f"Needed are {', '.join(wanted)}.")
            empty = True
            for row in reader:
                empty = False
                yield f"{path}:{reader.line_num}", row
    except OSError as why:
        raise BadInput(f"{path}: cannot be read: {why.strerror}") from why
    except (UnicodeDecodeError, csv.Error) as why:
        raise BadInput(f"{path}: not a CSV text file: {why}") from why
    if empty:
        raise BadInput(f"{path}: has no rows")


def _number(where: str, row: dict[str, str], column: str) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: {column} is '{text}', not a number")
    return value


def read_trace(path: Path) -> Trace:
    """All jobs of a trace, sorted by submit time; ties keep the file's order."""
    rows: list[tuple[float, float, int]] = []
    for where, row in _rows(path, ("submit_s", "duration_s", "num_gpus")):
        submit_s, duration_s, gpus = (_number(where, row, name) for name in ("submit_s", "duration_s", "num_gpus"))
        if submit_s < 0:
            raise BadInput(f"{where}: submit_s {submit_s:g} is negative")
        if duration_s <= 0:
            raise BadInput(f"{where}: duration_s {duration_s:g} is not positive")
        if gpus < 1 or gpus != int(gpus):
            raise BadInput(f"{where}: num_gpus {gpus:g} is not a positive whole number")
        rows.append((submit_s, duration_s, int(gpus)))
    rows.sort(key=lambda job: job[0])
    submit, duration, num = zip(*rows, strict=True)
    return Trace(np.array(submit, float), np.array(duration, float), np.array(num, np.int64))


def read_rates(path: Path, profiles: Sequence[str] | None = None) -> Pairs:
    """Measured pairs as a table; `profiles` (default: all that occur in the file) are those that jobs may get."""
    rows = read_pairs(path, profiles)
    names = sorted(profiles or rows.names)
    at = {name: i for i, name in enumerate(names)}
    rate = np.full((len(names), len(names)), np.nan)
    for a, b, rate_a, rate_b in zip(rows.profile_a, rows.profile_b, rows.rate_a, rows.rate_b, strict=True):
        if a == b:
            rate[at[a], at[a]] = (rate_a + rate_b) / 2
        else:
            rate[at[a], at[b]], rate[at[b], at[a]] = rate_a, rate_b
    return Pairs(tuple(names), rate)


def make_workload(
    trace: Trace, pairs: Pairs, *, gpus: int, jobs: int | None, load: float, seed: int, multi_gpu: bool = False
) -> Workload:
    """Pick the jobs, scale their arrivals to `load` (0: as in the trace) and deal them profiles."""
    chosen = np.flatnonzero((trace.num_gpus <= gpus) if multi_gpu else (trace.num_gpus == 1))
    if len(chosen) == 0:
        raise BadInput("the trace has no job that fits", "Single-GPU jobs are needed, or --multi-gpu and enough GPUs.")
    if jobs is not None and jobs > len(chosen):
        raise BadInput(f"--jobs {jobs}: the trace has only {len(chosen)} jobs that fit")
    chosen = chosen[:jobs]
    submit_s = trace.submit_s[chosen] - trace.submit_s[chosen[0]]
    duration_s, num_gpus = trace.duration_s[chosen], trace.num_gpus[chosen]
    if load > 0:
        if submit_s[-1] <= 0:
            raise BadInput(f"--load {load:g}: impossible, all jobs are submitted at once", "Use --load 0.")
        submit_s = submit_s * (float(np.sum(duration_s * num_gpus)) / (gpus * float(submit_s[-1]) * load))
    profile = np.random.default_rng(seed).integers(len(pairs.profiles), size=len(chosen))
    return Workload(gpus, submit_s, duration_s, num_gpus, profile.astype(np.int64), pairs, seed)
