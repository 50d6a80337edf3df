"""The telemetry record: one job, one GPU, numbers only.

A sampler's records are cumulative: of the same `run_id`, the one with the highest `seq` says all.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import chain, starmap
from operator import le
from types import MappingProxyType
from typing import Any, NamedTuple

from slurm_gpushare.protocol.attributes import ACTIVITY_NAMES, ANY, ATTRIBUTES, PERCENT
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.tokens import TOKEN

MAX_NEIGHBOURS = 256
ENOUGH = 20
"""The mean of so many samples of a run says what this run does, better than what earlier ones did."""
UNTOLD_MOST_S = 60.0
"""Where nobody can say for so long who uses a card, nobody shares it."""
OUTSIDE = "outside_pct"
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


class Mps(StrEnum):
    """Whom an MPS server on a card serves."""

    ONE_USER = "one-user"  # at a time: another user's program waits without a word
    ALL_USERS = "all-users"
    NOBODY = "nobody"  # it is in FAULT, or does not answer


UNDER_MPS = "MPS"
"""Ends the name under which rates of a GPU model under MPS are kept: those of time slices say nothing of them."""


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


# Checks of JSON that came from elsewhere: exact fields, finite numbers in range, text of a known form. A refusal names
# the field and never quotes the value, so that logs cannot be made to carry a user's text.


class RecordError(GpushareError):
    """A record does not fit the schema."""


def bad(where: str, why: str) -> RecordError:
    """The error to raise for a field."""
    return RecordError(f"record: {where} {why}")


def number(value: Any, where: str, limit: float = ANY) -> float:
    """A finite number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(where, "is not a number")
    if not 0 <= value <= limit or not math.isfinite(value):
        raise bad(where, f"is not from 0 to {limit:g}")
    return float(value)


def whole(value: Any, where: str, limit: int) -> int:
    """A whole number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise bad(where, f"is not a whole number from 0 to {limit}")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str]) -> str:
    """Text that `pattern` describes from its first character to its last."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise bad(where, "does not have the required form")
    return value


def choice(value: Any, where: str, kind: type[StrEnum]) -> StrEnum:
    """One of an enumeration's values."""
    try:
        return kind(value)
    except ValueError:
        raise bad(where, "is none of the known values") from None


def record_object(value: Any, where: str, required: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """An object with all of the `required` fields and no unknown one."""
    if not isinstance(value, dict) or not required <= value.keys() <= required | optional:
        raise bad(where, "does not have exactly the known fields")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise RecordError("record: a field is given twice")
    return body


def _no_constant(_: str) -> float:
    raise RecordError("record: has a number that is not finite")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def load_json(line: str | bytes, max_bytes: int) -> Any:
    """JSON in ASCII of bounded size, without repeated fields, NaN or infinities."""
    if len(line) > max_bytes:
        raise RecordError(f"record: longer than {max_bytes} bytes")
    try:
        return _DECODER.decode(line if isinstance(line, str) else line.decode("ascii"))
    except (ValueError, RecursionError):
        raise RecordError("record: not JSON") from None


# A record as one JSON line: `encode_record` is the only way out, `parse_record` the only way in.
#
# Both apply the same schema, so that a string from the user can neither be written nor be ingested. The strings that
# exist are random ids, a node name, a GPU model and (in a user's own record) a token, each of a strict pattern.


VERSION = 1
MAX_BYTES = 65536
MOST_CPUS = 9999

ID = re.compile(r"[0-9a-f]{32}")
NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")

_FEATURE_LIMITS = {item.name: ANY if item.name.endswith("_mib") else PERCENT for item in fields(Features)}
_MOST_SAMPLES = 2**40
_LIMITS = {name: attribute.limit for name, attribute in ATTRIBUTES.items()}

Check = Callable[[Any, str], Any]
"""What a field's JSON means, by the field's name; raises RecordError."""


def _stats(value: Any, where: str, names: frozenset[str]) -> Mapping[str, Stat]:
    """A column at a time: most of the time to parse a record went into looking at each number on its own."""
    if not isinstance(value, dict) or not value.keys() <= names:
        raise bad(where, "has an unknown attribute")
    if not value:
        return _no_stats()
    rows = value.values()
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {6}:
        raise bad(where, "has one that is not a list of six numbers")
    n, high, mean, low, p95, sd = zip(*rows, strict=True)
    limits = [_LIMITS[name] for name in value]
    if not (
        set(map(type, n)) == {int}  # exact types: a bool is none of them
        and set(map(type, chain(high, mean, low, p95, sd))) <= {int, float}
        and 0 < min(n) <= max(n) <= _MOST_SAMPLES
        and min(low) >= 0 and all(map(le, low, mean)) and all(map(le, mean, high)) and all(map(le, high, limits))
        and all(map(le, low, p95)) and all(map(le, p95, high))
        and min(sd) >= 0 and all(map(le, sd, limits))
    ):  # fmt: skip
        raise bad(where, "has one that is out of range or contradicts itself")
    return MappingProxyType(dict(zip(value, starmap(Stat, rows), strict=True)))


def _period(value: Any, where: str, names: frozenset[str] = ACTIVITY_NAMES) -> Period:
    body = record_object(value, where, {"alone_s", "shared_s", "stats"})
    alone_s, shared_s = (number(body[name], f"{where}.{name}") for name in ("alone_s", "shared_s"))
    return Period(alone_s, shared_s, _stats(body["stats"], f"{where}.stats", names))


def _features(value: Any, where: str) -> Features:
    found = record_object(value, where, set(_FEATURE_LIMITS))
    known = {name: item for name, item in found.items() if item is not None}
    return Features(**{name: number(item, f"{where}.{name}", _FEATURE_LIMITS[name]) for name, item in known.items()})


def _rows_of_two(value: Any, where: str, most: int) -> list[Any]:
    """A list of at most so many [number, number]."""
    if not isinstance(value, list) or len(value) > most:
        raise bad(where, f"is not a list of at most {most}")
    if not all(isinstance(item, list) and len(item) == 2 for item in value):
        raise bad(where, "has an item that is not a pair of numbers")
    return value


def _neighbours(value: Any, where: str) -> tuple[Neighbour, ...]:
    rows = _rows_of_two(value, where, MAX_NEIGHBOURS)
    return tuple(Neighbour(whole(job, where, 2**32), number(seconds, where)) for job, seconds in rows)


def _cpu_curve(value: Any, where: str) -> tuple[CpuSpeed, ...]:
    rows = _rows_of_two(value, where, MAX_CURVE_POINTS)
    found = tuple(CpuSpeed(whole(cpus, where, MOST_CPUS), number(speed, where, 1.0)) for cpus, speed in rows)
    if not found or min(point.cpus for point in found) < 1 or max(point.speed for point in found) != 1.0:
        raise bad(where, "contradicts itself")
    return found


def _true(value: Any, where: str) -> bool:
    if value is not True:
        raise bad(where, "is not true")
    return True


def _of_gang(value: Any, where: str) -> int:
    if whole(value, where, 255) < 2:
        raise bad(where, "is less than two")
    return int(value)


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one job on one GPU, or on all GPUs of a gang, from `start_s` to `end_s` (unix time).

    Each field has the check of what JSON says of it. One that has its `default` is left out of the line.
    """

    record_id: str = field(metadata={"check": partial(text, pattern=ID)})
    run_id: str = field(metadata={"check": partial(text, pattern=ID)})
    seq: int = field(metadata={"check": partial(whole, limit=2**31)})
    kind: RecordKind = field(metadata={"check": partial(choice, kind=RecordKind)})
    scope: Scope = field(metadata={"check": partial(choice, kind=Scope)})
    job_id: int = field(metadata={"check": partial(whole, limit=2**32)})
    node: str = field(metadata={"check": partial(text, pattern=NODE)})
    gpu_index: int = field(metadata={"check": partial(whole, limit=255)})
    gpu_model: str | None = field(
        metadata={"check": lambda value, where: None if value is None else text(value, where, GPU_MODEL)}
    )
    start_s: float = field(metadata={"check": number})
    end_s: float = field(metadata={"check": number})
    closed: Closed = field(metadata={"check": partial(choice, kind=Closed)})
    features: Features = field(metadata={"check": _features})
    profile: Period = field(metadata={"check": partial(_period, names=frozenset(ATTRIBUTES))})
    """All attributes, up to the end of the first epoch."""
    alone: Period = field(metadata={"check": _period})
    """The job's activity over the whole run while no other process was on the GPU."""
    shared: Period = field(metadata={"check": _period})
    """The same while another job's processes were."""
    neighbours: tuple[Neighbour, ...] = field(default_factory=tuple, metadata={"check": _neighbours})
    token: str | None = field(default=None, metadata={"check": partial(text, pattern=TOKEN)})
    """Only in a user's own record: which workload the command is. A node never knows."""
    one_process: bool = field(default=False, metadata={"check": _true})
    """Whether the card's compute mode admits a single process, so that nobody can share it."""
    mps: Mps | None = field(default=None, metadata={"check": partial(choice, kind=Mps)})
    """The card is under an MPS server."""
    blind: bool = field(default=False, metadata={"check": _true})
    """The card tells the server's activity and not its clients': beside others nothing is known of the job's own."""
    unsound: bool = field(default=False, metadata={"check": _true})
    """Whether the card was lost, or has had errors that cannot be corrected: nobody should join anybody there."""
    gpus: int = field(default=1, metadata={"check": _of_gang})
    """Of a gang: on how many GPUs of the node it was, all measured as one; `gpu_index` is the first of them."""
    stopped_s: float = field(default=0.0, metadata={"check": number})
    """How long the job stood still by the helper's orders. It counts neither as alone nor as shared."""
    woken: int = field(default=0, metadata={"check": partial(whole, limit=2**31)})
    """How often the sampler found it at work meanwhile: somebody else had let it go on, or it is ending."""
    untold_s: float = field(default=0.0, metadata={"check": number})
    """For so long, up to the end, somebody used the card of whom nobody could say how much: a process of no job, or one
    that is not there when the card is looked at."""
    cpu_curve: tuple[CpuSpeed, ...] = field(default=(), metadata={"check": _cpu_curve})
    """Only in a user's own record: what ``gpushare profile --cpus`` has measured."""

    @property
    def outsiders(self) -> bool:
        """Whether processes of no job were on its card, and used it or may have."""
        return self.untold_s > 0.0 or any(OUTSIDE in period.stats for period in (self.alone, self.shared))

    @property
    def alone_s(self) -> float:
        return self.alone.alone_s

    @property
    def shared_s(self) -> float:
        return self.shared.shared_s


_CHECKS: dict[str, Check] = {item.name: item.metadata["check"] for item in fields(Record)}
_OPTIONAL = {item.name: item.default for item in fields(Record) if item.default is not MISSING}


def _plain(value: Any) -> Any:
    """As JSON has it: objects for what has named parts, lists for what has an order."""
    if isinstance(value, Period | Features):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and not isinstance(value, Stat):
        return [astuple(item) for item in value]
    return value


def encode_record(record: Record) -> str:
    """The record as one line, checked against the schema on its way out."""
    values = {name: getattr(record, name) for name in _CHECKS}
    told = {name: _plain(value) for name, value in values.items() if value != _OPTIONAL.get(name, MISSING)}
    line = json.dumps({"v": VERSION, **told}, separators=(",", ":"), allow_nan=False)
    if parse_record(line) != record:
        raise RecordError("record: does not survive its own schema")
    return line


def parse_record(line: str | bytes) -> Record:
    """The record that `line` holds; RecordError for anything that is not exactly one."""
    raw = load_json(line, MAX_BYTES)
    if not isinstance(raw, dict) or raw.get("v") != VERSION or isinstance(raw.get("v"), bool):
        raise RecordError(f"record: not of version {VERSION}")
    body = record_object(raw, "record", {"v", *_CHECKS} - _OPTIONAL.keys(), frozenset(_OPTIONAL))
    record = Record(**{name: check(body[name], name) for name, check in _CHECKS.items() if name in body})
    if record.end_s < record.start_s:
        raise bad("end_s", "is before start_s")
    if record.alone.shared_s or record.shared.alone_s:
        raise bad("alone, shared", "contradict themselves")
    others = ("token", "cpu_curve") if record.scope is Scope.JOB else ("stopped_s", "woken", "untold_s")
    for name in others:
        if getattr(record, name):
            raise bad(name, f"is in a record of scope {record.scope}")
    return record
