"""Published traces as they come: Philly's JSON log, Alibaba's PAI tasks and openb pods, beside our own CSV.

A job that asks for a fraction of a card is a job of one card that says what it needs of it: two such jobs fit
together if their fractions do.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.protocol.errors import BadInput

MECHANISMS = ("as-measured", "mps", "slices")
MECHANISM = "whether the pairs were measured under MPS is not known: with 'slices' they count as if they were"


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """How fast each profile runs beside each other one. NaN: the two cannot share."""

    profiles: tuple[str, ...]  # sorted
    rate: Floats  # row: the job, column: its neighbour

    def under(self, mechanism: str) -> MeasuredPairs:
        """The same pairs under the other of two mechanisms, of which nobody has measured them.

        ``mps``: these rates are of time slices, and are wanted under MPS; ``slices`` the other way round. Losses are
        scaled by what was measured of training beside inference on an A100: both speeds add up to 1.76 under MPS
        and to 1.42 in slices. No pair comes out slower than by turns, at half of its speed, unless it was.
        """
        if mechanism == "as-measured":
            return self
        factor = (2.0 - 1.42) / (2.0 - 1.76)
        scaled = 1.0 - (1.0 - self.rate) * (factor if mechanism == "slices" else 1.0 / factor)
        return MeasuredPairs(self.profiles, np.maximum(scaled, np.minimum(self.rate, 0.5)))


@dataclass(frozen=True, slots=True)
class SimulatedJobs:
    """What one simulation runs: jobs with their profiles, on `gpus` equal cards."""

    gpus: int
    submit_s: Floats
    duration_s: Floats
    num_gpus: Ints
    profile: Ints  # index into pairs.profiles
    pairs: MeasuredPairs
    seed: int
    gpus_per_node: int = 0
    """0: any GPUs will do for a job of several."""

    @property
    def jobs(self) -> int:
        return len(self.submit_s)


FRACTIONS = 4


def with_fractions(work: SimulatedJobs, fraction: Floats) -> SimulatedJobs:
    """The same jobs where two fit on a card only if what they ask for of it does.

    Fractions are rounded up to quarters of a card: each profile then has four kinds, which run alike.
    """
    size = np.clip(np.ceil(fraction * FRACTIONS - 1e-9), 1, FRACTIONS).astype(np.int64)
    names = tuple(f"{name}@{n}" for name in work.pairs.profiles for n in range(1, FRACTIONS + 1))
    sizes = np.tile(np.arange(1, FRACTIONS + 1), len(work.pairs.profiles))
    rate = np.repeat(np.repeat(work.pairs.rate, FRACTIONS, axis=0), FRACTIONS, axis=1)
    fits = sizes[:, None] + sizes <= FRACTIONS
    kinds = MeasuredPairs(names, np.where(fits, rate, np.nan))
    return replace(work, profile=work.profile * FRACTIONS + size - 1, pairs=kinds)


PAI_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
_OURS = ("submit_s", "duration_s", "num_gpus")


@dataclass(frozen=True, slots=True)
class TracedJob:
    """One job; `fraction` is what it needs of its one card, 1 where it asks for all of it or for several."""

    submit_s: float
    duration_s: float
    gpus: int
    fraction: float = 1.0
    group: str = ""


def read_jobs(path: Path) -> list[TracedJob]:
    """All jobs of a trace of a known kind, which its first line tells; jobs that never ran on a GPU are left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            start = file.read(1)
            file.seek(0)
            if start in ("[", "{"):
                jobs = list(_philly(json.load(file)))
            else:
                jobs = list(_csv(path, csv.reader(file, skipinitialspace=True)))
    except OSError as why:
        raise BadInput(f"{path}: cannot be read: {why.strerror}") from why
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError) as why:
        raise BadInput(f"{path}: not a trace: {why}") from why
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(f"{path}: not a trace that is known here: {type(why).__name__}: {why}", _KNOWN) from why
    if not jobs:
        raise BadInput(f"{path}: has no rows of jobs that ran on a GPU", _KNOWN)
    return sorted(jobs, key=lambda job: job.submit_s)


_KNOWN = "Known are ours (submit_s, duration_s, num_gpus), Philly's JSON, Alibaba's PAI task table and openb pod list."


def _csv(path: Path, rows: Iterator[list[str]]) -> Iterator[TracedJob]:
    first = next(rows, [])
    names = [name.strip() for name in first]
    if set(_OURS) <= set(names):
        yield from (_ours(f"{path}:{line}", dict(zip(names, row, strict=False))) for line, row in enumerate(rows, 2))
    elif "gpu_milli" in names:
        yield from _openb(dict(zip(names, row, strict=False)) for row in rows)
    elif "plan_gpu" in names:
        yield from _pai(dict(zip(names, row, strict=False)) for row in rows)
    elif len(first) == len(PAI_COLUMNS):  # published without a header
        yield from _pai(dict(zip(PAI_COLUMNS, row, strict=False)) for row in (first, *rows))
    else:
        missing = [name for name in _OURS if name not in names]
        raise BadInput(f"{path}: no column {', '.join(missing)}", _KNOWN)


def _finite(text: str | None) -> float:
    try:
        value = float(text or "nan")
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _ours(where: str, row: dict[str, str]) -> TracedJob:
    submit_s, duration_s, gpus = (_finite(row.get(name)) for name in _OURS)
    for name, value in zip(_OURS, (submit_s, duration_s, gpus), strict=True):
        if math.isnan(value):
            raise BadInput(f"{where}: {name} is '{row.get(name) or ''}', not a number")
    if submit_s < 0:
        raise BadInput(f"{where}: submit_s {submit_s:g} is negative")
    if duration_s <= 0:
        raise BadInput(f"{where}: duration_s {duration_s:g} is not positive")
    if gpus <= 0 or (gpus > 1 and gpus != int(gpus)):
        raise BadInput(f"{where}: num_gpus {gpus:g} is not a positive whole number, nor a fraction of one GPU")
    return TracedJob(submit_s, duration_s, max(1, int(gpus)), min(gpus, 1.0), row.get("group") or "")


def _openb(rows: Iterable[dict[str, str]]) -> Iterator[TracedJob]:
    """openb_pod_list_*.csv: times in seconds, gpu_milli thousandths of each of num_gpu cards."""
    for row in rows:
        gpus, milli = _finite(row["num_gpu"]), _finite(row["gpu_milli"])
        begun, ended = _finite(row.get("scheduled_time")), _finite(row["deletion_time"])
        submit_s = _finite(row["creation_time"])
        start_s = submit_s if math.isnan(begun) else begun
        if gpus >= 1 and ended > start_s:
            fraction = milli / 1000.0 if gpus == 1 and 0 < milli < 1000 else 1.0
            yield TracedJob(submit_s, ended - start_s, int(gpus), fraction, row.get("qos") or "")


def _pai(rows: Iterable[dict[str, str]]) -> Iterator[TracedJob]:
    """pai_task_table.csv: plan_gpu is per cent of a card for each of inst_num instances. It has no submit time."""
    for row in rows:
        start_s, end_s = _finite(row["start_time"]), _finite(row["end_time"])
        instances, percent = _finite(row["inst_num"]), _finite(row["plan_gpu"])
        if not (percent > 0 and end_s > start_s and instances >= 1):
            continue
        if instances == 1 and percent < 100:
            yield TracedJob(start_s, end_s - start_s, 1, percent / 100.0, row.get("gpu_type") or "")
        else:
            gpus = math.ceil(instances * percent / 100.0)
            yield TracedJob(start_s, end_s - start_s, gpus, 1.0, row.get("gpu_type") or "")


def _moment(text: Any) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S").timestamp()
    except ValueError:
        return None


def _philly(body: Any) -> Iterator[TracedJob]:
    """cluster_job_log: a list of jobs with attempts; the time of all attempts is what a job needed."""
    for job in body if isinstance(body, list) else [body]:
        submit_s = _moment(job["submitted_time"])
        runs = [(_moment(a.get("start_time")), _moment(a.get("end_time")), a.get("detail")) for a in job["attempts"]]
        spans = [(start, end) for start, end, _ in runs if start is not None and end is not None and end > start]
        gpus = max((sum(len(host["gpus"]) for host in detail or ()) for _, _, detail in runs), default=0)
        if submit_s is not None and spans and gpus:
            yield TracedJob(submit_s, sum(end - start for start, end in spans), gpus, 1.0, str(job.get("vc", "")))
