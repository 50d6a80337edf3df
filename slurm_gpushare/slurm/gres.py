"""GRES strings: what a job asks for, what a node has, what of it is in use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.slurm.values import text

_ITEM = re.compile(
    r"(?:gres[:/])?(?P<name>[A-Za-z]\w*)(?::(?P<type>[A-Za-z][\w.+-]*))?(?:[:=](?P<count>\d{1,18})(?P<unit>[KMGkmg]?))?"
)
_USED = re.compile(r"(?P<name>\w+):(?P<type>[A-Za-z][\w.+-]*):(?P<count>\d{1,18})(?:\((?P<detail>[^)]*)\))?")
_INDEX = re.compile(r"_(\d{1,4})$")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


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
        match = _ITEM.fullmatch(item.strip())
        if match and ("=" not in item or item.strip().startswith("gres")):  # from 24.11 --cpus-per-task=3 is "cpu=3"
            count = int(match["count"] or 1) * _UNITS[(match["unit"] or "").lower()]
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
    if not release.gpu_becomes_shard:
        before, after = typed_shards(current), typed_shards(wanted)
        if before is None or after is None or before.type != after.type:
            return None
    kept = {(gres.name, gres.type) for gres in new}
    zeroed = [Gres(gres.name, gres.type, 0) for gres in old if gres.type and (gres.name, gres.type) not in kept]
    if any(gres.name != new[0].name for gres in zeroed):
        zeroed = []  # gpu to shard or back replaces the request as a whole, where it is possible at all
    return ",".join(map(str, [*zeroed, *new]))
