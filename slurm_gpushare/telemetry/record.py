"""The telemetry record: one job, one GPU, numbers only.

A record is one JSON line. `parse_record` is the only way in and `to_json` the only way out; both apply the
same schema, so that a string from the user can neither be written nor be ingested. The strings that exist
are random ids, a node name, a GPU model and (in a user's own record) a token, each of a strict pattern.

A sampler's records are cumulative: of the same `run_id`, the one with the highest `seq` says all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain, starmap
from operator import le
from types import MappingProxyType
from typing import Any, NamedTuple

from slurm_gpushare.telemetry.attributes import ACTIVITY_NAMES, ANY, ATTRIBUTES, PERCENT
from slurm_gpushare.telemetry.schema import RecordError, bad, choice, load_json, number, record_object, text, whole
from slurm_gpushare.tokens import TOKEN

VERSION = 1
MAX_BYTES = 65536
MAX_NEIGHBOURS = 256

ID = re.compile(r"[0-9a-f]{32}")
NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
GPU_MODEL = re.compile(r"[A-Z][A-Z0-9]{0,23}")


class Kind(StrEnum):
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
    """What was measured of one job on one GPU, from `start_s` to `end_s` (unix time)."""

    record_id: str
    run_id: str
    seq: int
    kind: Kind
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

    @property
    def alone_s(self) -> float:
        return self.alone.alone_s

    @property
    def shared_s(self) -> float:
        return self.shared.shared_s

    def to_json(self) -> str:
        """The record as one line, checked against the schema on its way out."""
        line = json.dumps(_encode(self), separators=(",", ":"), allow_nan=False)
        if parse_record(line) != self:
            raise RecordError("record: does not survive its own schema")
        return line


def new_id() -> str:
    """128 random bits: a record's id says nothing about when or where it was made."""
    return secrets.token_hex(16)


_VENDOR = {"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GRAPHICS", "DEVICE"}
_VARIANT = re.compile(r"\d+GB|PCIE|SXM\d*|HBM\d?E?|NVL|MIG|LAPTOP|GPU")


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


def _encode_period(period: Period) -> dict[str, Any]:
    return {
        "alone_s": period.alone_s,
        "shared_s": period.shared_s,
        "stats": {
            name: [stat.n, stat.max, stat.mean, stat.min, stat.p95, stat.sd] for name, stat in period.stats.items()
        },
    }


def _encode(record: Record) -> dict[str, Any]:
    body: dict[str, Any] = {
        "v": VERSION,
        "record_id": record.record_id,
        "run_id": record.run_id,
        "seq": record.seq,
        "kind": record.kind.value,
        "scope": record.scope.value,
        "job_id": record.job_id,
        "node": record.node,
        "gpu_index": record.gpu_index,
        "gpu_model": record.gpu_model,
        "start_s": record.start_s,
        "end_s": record.end_s,
        "closed": record.closed.value,
        "features": {item.name: getattr(record.features, item.name) for item in fields(Features)},
        "profile": _encode_period(record.profile),
        "alone": _encode_period(record.alone),
        "shared": _encode_period(record.shared),
        "neighbours": [[neighbour.job_id, neighbour.seconds] for neighbour in record.neighbours],
    }
    if record.token is not None:
        body["token"] = record.token
    return body


# --- the schema ---------------------------------------------------------------------------------------------

_REQUIRED = {
    "v", "record_id", "run_id", "seq", "kind", "scope", "job_id", "node", "gpu_index", "gpu_model", "start_s", "end_s",
    "closed", "features", "profile", "alone", "shared", "neighbours",
}  # fmt: skip
_FEATURE_LIMITS = {item.name: ANY if item.name.endswith("_mib") else PERCENT for item in fields(Features)}
_SLACK = 1e-6  # sums of floats
_MOST_SAMPLES = 2**40
_LIMITS = {name: attribute.limit for name, attribute in ATTRIBUTES.items()}


def _stat(value: Any, where: str, limit: float) -> Stat:
    if not isinstance(value, list) or len(value) != 6:
        raise bad(where, "is not a list of six numbers")
    n = whole(value[0], where, _MOST_SAMPLES)
    high, mean, low, p95, sd = (number(item, where, limit) for item in value[1:])
    slack = _SLACK * max(1.0, high)
    if n == 0 or not (low - slack <= mean <= high + slack and low - slack <= p95 <= high + slack):
        raise bad(where, "contradicts itself")
    return Stat(n, high, mean, low, p95, sd)


def _all_right(stats: dict[str, Any]) -> bool:
    """Whether all of them are right, in order to the last digit, as samplers write them.

    It looks at a column at a time: most of the time to parse a record went into looking at each on its own.
    """
    rows = stats.values()
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {6}:
        return False
    n, high, mean, low, p95, sd = zip(*rows, strict=True)
    limits = [_LIMITS[name] for name in stats]
    return (
        set(map(type, n)) == {int}  # exact types: a bool is none of them
        and set(map(type, chain(high, mean, low, p95, sd))) <= {int, float}
        and 0 < min(n) <= max(n) <= _MOST_SAMPLES
        and min(low) >= 0 and all(map(le, low, mean)) and all(map(le, mean, high)) and all(map(le, high, limits))
        and all(map(le, low, p95)) and all(map(le, p95, high))
        and min(sd) >= 0 and all(map(le, sd, limits))
    )  # fmt: skip


def _stats(value: Any, where: str, names: frozenset[str]) -> Mapping[str, Stat]:
    if not isinstance(value, dict) or not value.keys() <= names:
        raise bad(where, "has an unknown attribute")
    if _all_right(value):
        return MappingProxyType(dict(zip(value, starmap(Stat, value.values()), strict=True)))
    return MappingProxyType({name: _stat(item, f"{where}.{name}", _LIMITS[name]) for name, item in value.items()})


def _period(value: Any, where: str, names: frozenset[str]) -> Period:
    body = record_object(value, where, {"alone_s", "shared_s", "stats"})
    return Period(
        number(body["alone_s"], f"{where}.alone_s"),
        number(body["shared_s"], f"{where}.shared_s"),
        _stats(body["stats"], f"{where}.stats", names),
    )


def _neighbours(value: Any) -> tuple[Neighbour, ...]:
    if not isinstance(value, list) or len(value) > MAX_NEIGHBOURS:
        raise bad("neighbours", f"is not a list of at most {MAX_NEIGHBOURS}")
    found = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise bad("neighbours", "has an item that is not [job, seconds]")
        found.append(Neighbour(whole(item[0], "neighbours", 2**32), number(item[1], "neighbours")))
    return tuple(found)


def parse_record(line: str | bytes) -> Record:
    """The record that `line` holds; RecordError for anything that is not exactly one."""
    raw = load_json(line, MAX_BYTES)
    if not isinstance(raw, dict) or raw.get("v") != VERSION or isinstance(raw.get("v"), bool):
        raise RecordError(f"record: not of version {VERSION}")
    body = record_object(raw, "record", _REQUIRED, frozenset({"token"}))
    features = record_object(body["features"], "features", set(_FEATURE_LIMITS))
    record = Record(
        record_id=text(body["record_id"], "record_id", ID),
        run_id=text(body["run_id"], "run_id", ID),
        seq=whole(body["seq"], "seq", 2**31),
        kind=choice(body["kind"], "kind", Kind),
        scope=choice(body["scope"], "scope", Scope),
        job_id=whole(body["job_id"], "job_id", 2**32),
        node=text(body["node"], "node", NODE),
        gpu_index=whole(body["gpu_index"], "gpu_index", 255),
        gpu_model=None if body["gpu_model"] is None else text(body["gpu_model"], "gpu_model", GPU_MODEL),
        start_s=number(body["start_s"], "start_s"),
        end_s=number(body["end_s"], "end_s"),
        closed=choice(body["closed"], "closed", Closed),
        features=Features(
            **{
                name: None if features[name] is None else number(features[name], f"features.{name}", limit)
                for name, limit in _FEATURE_LIMITS.items()
            }
        ),
        profile=_period(body["profile"], "profile", frozenset(ATTRIBUTES)),
        alone=_period(body["alone"], "alone", ACTIVITY_NAMES),
        shared=_period(body["shared"], "shared", ACTIVITY_NAMES),
        neighbours=_neighbours(body["neighbours"]),
        token=text(body["token"], "token", TOKEN) if "token" in body else None,
    )
    if record.end_s < record.start_s:
        raise bad("end_s", "is before start_s")
    if record.alone.shared_s or record.shared.alone_s:
        raise bad("alone, shared", "contradict themselves")
    if record.token is not None and record.scope is Scope.JOB:
        raise bad("token", "is in a record of a node")
    return record
