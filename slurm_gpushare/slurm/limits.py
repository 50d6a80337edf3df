"""Limits of QOS and associations that name TRES, from ``sacctmgr show``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_gpushare.slurm import values

_QOS_LIMITS = (
    "GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "MaxTRESPerUser",
    "MaxTRESPerAccount", "MinTRES",
)  # fmt: skip
_ASSOCIATION_LIMITS = ("GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, e.g. GrpTRES of the QOS ``normal``."""

    kind: str
    """``qos`` or ``assoc``, as sacctmgr names the entity."""
    owner: Mapping[str, str]
    """What selects the entity: ``name``, or ``account`` with perhaps ``user`` and ``partition``."""
    name: str
    tres: Mapping[str, str]

    def __str__(self) -> str:
        owner = " ".join(f"{key}={value}" for key, value in self.owner.items())
        return f"{self.name} of {self.kind} {owner}"


def sacctmgr_arguments(kind: str) -> list[str]:
    """The sacctmgr command line that lists all entities of `kind` with their limits."""
    columns = ("Name", *_QOS_LIMITS) if kind == "qos" else ("Account", "User", "Partition", *_ASSOCIATION_LIMITS)
    return ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", kind, f"format={','.join(columns)}"]


def parse_limits(kind: str, output: str) -> list[Limit]:
    """The limits in sacctmgr's answer. Names of QOS and accounts cannot hold its delimiter."""
    keys = ("name",) if kind == "qos" else ("account", "user", "partition")
    names = _QOS_LIMITS if kind == "qos" else _ASSOCIATION_LIMITS
    found = []
    for line in output.splitlines():
        cells = line.split("|")
        owner = {key: cell for key, cell in zip(keys, cells, strict=False) if cell}
        for name, cell in zip(names, cells[len(keys) :], strict=False):
            if tres := values.tres(cell):
                found.append(Limit(kind, owner, name, tres))
    return found
