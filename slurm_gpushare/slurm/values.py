"""The ways in which Slurm writes numbers, times, arrays, names of nodes and GRES."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import product

from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.release import Release

ABSENT = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNLIMITED", "Partition_Limit", "NOT_SET", "n/a"})
_UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)[cn]?")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)(?:\.\d+)?")


def text(value: str) -> str:
    """The value, or the empty string where Slurm says in one of its ways that there is none."""
    value = value.strip()
    return "" if value in ABSENT else value


def integer(value: str) -> int | None:
    """A whole number, or None."""
    value = value.strip()
    return int(value) if value.isascii() and value.isdecimal() else None


def memory_mib(value: str) -> int | None:
    """``100M``, ``62.50G``, ``2000`` (Slurm's plain numbers are MiB) -> MiB."""
    found = _MEMORY.fullmatch(value.strip())
    return round(float(found[1]) * _UNITS_MIB[found[2] or "M"]) if found else None


def duration_s(value: str) -> int | None:
    """``1-02:00:00``, ``5:00``, ``30`` (seconds) -> seconds; None for UNLIMITED and the like."""
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = found.groups()
    if hours is not None and minutes is None:
        hours, minutes = None, hours
    return ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes or 0)) * 60 + int(seconds)


def tres(value: str) -> dict[str, str]:
    """``cpu=1,mem=100M,gres/shard=1`` -> {"cpu": "1", ...}."""
    return dict(part.split("=", 1) for part in text(value).split(",") if "=" in part)


def pairs(line: str) -> dict[str, str]:
    """``Key=Value Key=Value`` of ``scontrol show ... -o``, for entities whose values hold no spaces."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


# Instants as people write them for squeue's and sacct's -S and -E.


_RELATIVE = re.compile(r"now(?:([+-])(\d+)(seconds?|minutes?|hours?|days?|weeks?)?)?")
_FORMS = (
    "%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%m%d%y", "%m/%d/%y", "%m%d", "%m/%d", "%H:%M", "%H:%M:%S",
)  # fmt: skip
"""What each form leaves unsaid comes from today."""
_HOURS = {"today": 0, "midnight": 0, "noon": 12, "teatime": 16}


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """The local time that `text` means, in the forms that sacct(1) lists; BadInput for any other."""
    now = now or datetime.now()
    word = text.strip()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if (hour := _HOURS.get(word.lower())) is not None:
        return midnight.replace(hour=hour)
    if relative := _RELATIVE.fullmatch(word.lower()):
        sign, amount, unit = relative.groups()
        delta = timedelta(**{(unit or "seconds").rstrip("s") + "s": int(amount or 0)})
        return now - delta if sign == "-" else now + delta
    for form in _FORMS:
        if len(word) != len(now.strftime(form)):
            continue
        try:
            found = datetime.strptime(word.replace(" ", "T"), form)
        except ValueError:
            continue
        if "d" not in form:
            return midnight.replace(hour=found.hour, minute=found.minute, second=found.second)
        return found if "y" in form.lower() else found.replace(year=now.year)
    raise BadInput(f"'{text}' is not a time", "Write YYYY-MM-DD[THH:MM[:SS]], HH:MM, MM/DD, today or now-7days.")


# Arrays as Slurm writes them: waiting tasks ``0-20:4,25,30-31%2``, a task's key ``6_2``.


_MOST = 4_000_001  # Slurm's own bound of MaxArraySize
_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand_tasks(expression: str) -> tuple[int, ...]:
    """The task numbers, in their order; ValueError for anything else, such as a list that Slurm cut off (``...``)."""
    tasks: list[int] = []
    for item in expression.strip().strip("[]").partition("%")[0].split(","):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"'{expression}' names no array tasks")
        first, last, step = found.groups()
        if int(last or first) - int(first) + len(tasks) > _MOST or int(step or 1) == 0:
            raise ValueError(f"'{expression[:60]}' names too many array tasks")
        tasks.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(tasks)


def array_of(key: str) -> int:
    """``6`` of 6_2, the id that the tasks of an array have while they wait together; a lone job's own."""
    return int(re.split(r"[_+]", key)[0])


# Slurm's short form of node names: ``gpu[0-3,7],login1``.


MOST_NAMES = 1 << 17
"""In one expression: twice what Slurm itself takes. A broken answer must not take the machine's memory."""
_BRACKET = re.compile(r"\[([^\]]*)\]")


def _split(expression: str) -> list[str]:
    """Split at commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(expression):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(expression[start:position])
            start = position + 1
    return [part for part in [*parts, expression[start:]] if part]


def _numbers(ranges: str) -> Iterable[str]:
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not last:
            yield first
            continue
        if not (first.isdecimal() and last.isdecimal() and int(last) - int(first) < MOST_NAMES):
            raise SlurmError(f"'{ranges[:60]}' is no range of nodes", "This Slurm release is not known.")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


@lru_cache(maxsize=4096)
def expand(expression: str) -> tuple[str, ...]:
    """The names that an expression stands for, in its order."""
    names: list[str] = []
    for part in _split(expression.strip()):
        pieces = _BRACKET.split(part)
        options = [[piece] if index % 2 == 0 else list(_numbers(piece)) for index, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, options)) > MOST_NAMES:
            raise SlurmError(f"'{expression[:60]}' stands for too many nodes", "This Slurm release is not known.")
        names.extend("".join(choice) for choice in product(*options))
    return tuple(names)


# GRES: what a job asks for, what a node has, what of it is in use.


_GRES = re.compile(
    r"(?:gres[:/])?(?P<name>[A-Za-z]\w*)(?::(?P<type>[A-Za-z][\w.+-]*))?(?:[:=](?P<count>\d{1,18})(?P<unit>[KMGkmg]?))?"
)
_USED = re.compile(r"(?P<name>\w+):(?P<type>[A-Za-z][\w.+-]*):(?P<count>\d{1,18})(?:\((?P<detail>[^)]*)\))?")
_INDEX = re.compile(r"_(\d{1,4})$")
_GRES_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


@dataclass(frozen=True, slots=True)
class Gres:
    """``count`` of a kind: of a request, of a node, or in use."""

    name: str
    type: str
    count: int

    def __str__(self) -> str:
        return ":".join(part for part in (self.name, self.type, str(self.count)) if part)


@lru_cache(maxsize=8192)
def parse_gres(value: str) -> tuple[Gres, ...]:
    """``gres:gpu:v100_0:1``, ``gres/shard:2``, ``gpu:a:1(S:0),shard:4``; what is not GRES is left out."""
    found = []
    for item in re.sub(r"\([^)]*\)", "", text(value)).split(","):
        match = _GRES.fullmatch(item.strip())
        if match and ("=" not in item or item.strip().startswith("gres")):  # from 24.11 --cpus-per-task=3 is "cpu=3"
            count = int(match["count"] or 1) * _GRES_UNITS[(match["unit"] or "").lower()]
            found.append(Gres(match["name"], match["type"] or "", count))
    return tuple(found)


@lru_cache(maxsize=8192)
def type_index(gres_type: str) -> int | None:
    """The GPU index that a per-index type names: ``v100_2`` -> 2."""
    found = _INDEX.search(gres_type)
    return int(found[1]) if found else None


@lru_cache(maxsize=8192)
def model_of_type(gres_type: str) -> str:
    """The GPU model that a per-index type names: ``v100_2`` -> ``v100``; any other type is a model itself."""
    return _INDEX.sub("", gres_type)


@lru_cache(maxsize=8192)
def gres_of_all(asked: tuple[str, ...]) -> tuple[Gres, ...]:
    """All of several such strings together."""
    return tuple(gres for value in asked for gres in parse_gres(value))


@lru_cache(maxsize=8192)
def typed_shards(value: str) -> Gres | None:
    """The one typed shard request that places a job on an exact GPU, or None. Zeroed parts do not count."""
    shards = [gres for gres in parse_gres(value) if gres.count]
    if len(shards) == 1 and shards[0].name == "shard" and type_index(shards[0].type) is not None:
        return shards[0]
    return None


@dataclass(frozen=True, slots=True)
class Usage:
    """What of a node's GPUs is in use, by GPU index."""

    whole: frozenset[int]
    """GPUs that a job has whole."""
    shards: dict[int, int]
    """Shards in use on each GPU that is shared; up to 23.11.1 Slurm only says that it is (see `exact`)."""
    exact: bool


def parse_used(value: str, exact: bool) -> Usage:
    """A node's GresUsed, with one type per GPU index.

    ``gpu:v100_0:1(IDX:0),shard:v100_1:1(IDX:1)`` on 22.05, where shards count GPUs;
    ``gpu:v100_0:1(IDX:0),shard:v100_1:2(0/2,2/2)`` from 23.11.2.
    """
    whole: set[int] = set()
    shards: dict[int, int] = {}
    for match in _USED.finditer(text(value)):
        count, index = int(match["count"]), type_index(match["type"])
        if not count or index is None:
            continue
        if match["name"] == "gpu":
            whole.add(index)
        elif match["name"] == "shard":
            shards[index] = shards.get(index, 0) + count
    return Usage(frozenset(whole), shards, exact)


# The one way to change a pending job's GPU that works on every release.


def retarget(current: str, wanted: str, release: Release) -> str | None:
    """The ``Gres=`` value that turns the request `current` (tres_per_node) into `wanted`; None: this Slurm cannot.

    Where a typed shard request moves to another type, the old type is set to zero beside the new one. 22.05 can
    only change how many shards of the same type are wanted: it accepts another type, but when such a job ends
    it takes a shard of the old type for used for ever, and nothing more fits that card.
    """
    new = parse_gres(wanted)
    if not new:
        return None
    old = [gres for gres in parse_gres(current) if gres.count]
    if list(new) == old:
        return ",".join(map(str, new))
    if not release.can("gpu_becomes_shard"):
        before, after = typed_shards(current), typed_shards(wanted)
        if before is None or after is None or before.type != after.type:
            return None
    kept = {(gres.name, gres.type) for gres in new}
    zeroed = [Gres(gres.name, gres.type, 0) for gres in old if gres.type and (gres.name, gres.type) not in kept]
    if any(gres.name != new[0].name for gres in zeroed):
        zeroed = []  # gpu to shard or back replaces the request as a whole, where it is possible at all
    return ",".join(map(str, [*zeroed, *new]))


# What users name: states, job ids, lists.


def names(text: str) -> frozenset[str]:
    """A comma list as squeue takes it."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


# squeue(1) and sacct(1), JOB STATE CODES, with the short forms that squeue takes.
STATES = {
    "BOOT_FAIL": "BF", "CANCELLED": "CA", "COMPLETED": "CD", "COMPLETING": "CG", "CONFIGURING": "CF",
    "DEADLINE": "DL", "FAILED": "F", "NODE_FAIL": "NF", "OUT_OF_MEMORY": "OOM", "PENDING": "PD", "PREEMPTED": "PR",
    "REQUEUED": "RQ", "REQUEUE_FED": "RF", "REQUEUE_HOLD": "RH", "RESIZING": "RS", "RESV_DEL_HOLD": "RD",
    "REVOKED": "RV", "RUNNING": "R", "SIGNALING": "SI", "SPECIAL_EXIT": "SE", "STAGE_OUT": "SO", "STOPPED": "ST",
    "SUSPENDED": "S", "TIMEOUT": "TO",
}  # fmt: skip
_JOB_ID = re.compile(r"\d+(?:_\d+|\+\d+)?")
_WAITING_TASKS = re.compile(r"(\d+)_(\[[^]]*\])")
_COMMAS = re.compile(r",(?![^[]*\])")


def check_states(text: str) -> frozenset[str]:
    """States by their long names."""
    longer = {short: name for name, short in STATES.items()}
    wanted = {name.upper() for name in names(text)}
    if unknown := sorted(wanted - STATES.keys() - longer.keys()):
        raise BadInput(f"there is no job state '{unknown[0]}'", "See squeue(1), JOB STATE CODES.")
    return frozenset(longer.get(name, name) for name in wanted)


def check_job_ids(words: Iterable[str]) -> list[str]:
    """Job ids as squeue prints them, several in a word by commas; waiting tasks (``6_[0-3%2]``) one by one."""
    return [job_id for word in words for part in _COMMAS.split(word) if part or not word for job_id in _job_ids(part)]


def _job_ids(text: str) -> list[str]:
    if _JOB_ID.fullmatch(text):
        return [text]
    if tasks := _WAITING_TASKS.fullmatch(text):
        try:
            return [f"{tasks[1]}_{task}" for task in expand_tasks(tasks[2])]
        except ValueError:
            pass
    raise BadInput(f"'{text}' is no job id", "Give it as squeue prints it: 14, 6_2, 6_[3-5].")
