"""The telemetry record: one job, one GPU, numbers only.

A sampler's records are cumulative: of the same `run_id`, the one with the highest `seq` says all.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

MAX_NEIGHBOURS = 256
ENOUGH = 20
"""The mean of so many samples of a run says what this run does, better than what earlier ones did."""
MAX_CURVE_POINTS = 64
NEARLY = 0.95
"""As fast as the fastest, for all that one epoch can tell."""

GPU_MODEL = re.compile(r"[A-Z][A-Z0-9]{0,23}")


class RecordKind(StrEnum):
    """Whether the job was still running."""

    INTERIM = "interim"
    FINAL = "final"


class Scope(StrEnum):
    """What was measured: a job by its node's sampler, or one command by its user's ``gpushare profile``."""

    JOB = "job"
    COMMAND = "command"


class Closed(StrEnum):
    """Why the profile part of a record ended."""

    OPEN = "open"  # not ended: more may come in a later record
    EPOCH = "epoch"  # the job said that its epoch was over
    LIMIT = "limit"  # ProbeSeconds, or --max-seconds
    END = "end"  # the job or the command ended first


class Stat(NamedTuple):
    """Summary of one attribute's samples. A tuple: a record has some eighty, and ingest makes thousands a second."""

    n: int
    max: float
    mean: float
    min: float
    p95: float
    sd: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another job on the same GPU, and for how long both had processes there."""

    job_id: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """How fast a workload is on so many CPUs: its speed over that on the number where it is fastest, 0 to 1."""

    cpus: int
    speed: float


def enough_cpus(curve: Sequence[CpuSpeed]) -> int:
    """The fewest CPUs with which it is nearly as fast as with any."""
    return min(point.cpus for point in curve if point.speed >= NEARLY * max(other.speed for other in curve))


def _no_stats() -> Mapping[str, Stat]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Period:
    """Statistics over part of a run, by attribute name; an attribute without a sample is absent."""

    alone_s: float = 0.0
    shared_s: float = 0.0
    stats: Mapping[str, Stat] = field(default_factory=_no_stats)

    @property
    def seconds(self) -> float:
        return self.alone_s + self.shared_s


@dataclass(frozen=True, slots=True)
class Features:
    """What clusters and the knowledge base are made of; None where it was not measured."""

    mgup: float | None = None
    mgmap: float | None = None
    mgtsamp: float | None = None
    gpu_util_mean_pct: float | None = None
    mem_access_mean_pct: float | None = None
    mem_used_mib: float | None = None
    """Peak of what the job's own processes allocated."""
    mem_total_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one job on one GPU, or on all GPUs of a gang, from `start_s` to `end_s` (unix time)."""

    record_id: str
    run_id: str
    seq: int
    kind: RecordKind
    scope: Scope
    job_id: int
    node: str
    gpu_index: int
    gpu_model: str | None
    start_s: float
    end_s: float
    closed: Closed
    features: Features
    profile: Period
    """All attributes, up to the end of the first epoch."""
    alone: Period
    """The job's activity over the whole run while no other process was on the GPU."""
    shared: Period
    """The same while another job's processes were."""
    neighbours: tuple[Neighbour, ...] = ()
    token: str | None = None
    """Only in a user's own record: which workload the command is. A node never knows."""
    one_process: bool = False
    """Whether the card's compute mode admits a single process, so that nobody can share it."""
    gpus: int = 1
    """Of a gang: on how many GPUs of the node it was, all measured as one; `gpu_index` is the first of them."""
    stopped_s: float = 0.0
    """How long the job stood still by the helper's orders. It counts neither as alone nor as shared."""
    woken: int = 0
    """How often the sampler found it at work meanwhile: somebody else had let it go on, or it is ending."""
    cpu_curve: tuple[CpuSpeed, ...] = ()
    """Only in a user's own record: what ``gpushare profile --cpus`` has measured."""

    @property
    def alone_s(self) -> float:
        return self.alone.alone_s

    @property
    def shared_s(self) -> float:
        return self.shared.shared_s


def new_id() -> str:
    """128 random bits: a record's id says nothing about when or where it was made."""
    return secrets.token_hex(16)


_VENDOR = {"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GRAPHICS", "DEVICE"}
_VARIANT = re.compile(r"\d+GB?|PCIE|SXM\d*|HBM\d?E?|NVL|MIG|LAPTOP|GPU")


def gpu_model(nvml_name: str) -> str | None:
    """``Tesla V100-SXM2-16GB`` -> ``V100``, ``NVIDIA GeForce RTX 3090`` -> ``RTX3090``; None if it looks like no GPU.

    Form factor and memory are left out: rates are kept by model, and a record has the memory as a number.
    """
    words = re.split(r"[^A-Z0-9]+", nvml_name.upper())
    kept = []
    for word in words:
        if not word or word in _VENDOR:
            continue
        if _VARIANT.fullmatch(word):
            break
        kept.append(word)
    model = "".join(kept)
    return model if nvml_name.isascii() and GPU_MODEL.fullmatch(model) else None
