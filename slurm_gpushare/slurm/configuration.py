"""What a site set up: configuration, partitions, reservations, from ``scontrol show``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.values import expand

_AS_OF = "Configuration data as of "


def parse_config(output: str) -> dict[str, str]:
    """``scontrol show config``: one ``Key = Value`` a line, keys as slurm.conf(5) spells them."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith(_AS_OF):
            found["as_of"] = line.removeprefix(_AS_OF).strip()  # slurmctld's clock
        name, equals, value = line.partition(" = ")
        if equals and not name.startswith(" "):
            found[name.strip()] = value.strip()
    return found


class SlurmUser(NamedTuple):
    """Who runs slurmctld."""

    name: str
    uid: int | None


def slurm_user(config: Mapping[str, str]) -> SlurmUser:
    """From ``SlurmUser = slurm(64030)``."""
    name, _, uid = config.get("SlurmUser", "slurm").rstrip(")").partition("(")
    return SlurmUser(name, int(uid) if uid.isdecimal() else None)


def completing_stops_everybody(config: Mapping[str, str]) -> bool:
    """Whether a job in its epilog keeps the main scheduler from starting anything anywhere."""
    waits = re.match(r"\d+", config.get("CompleteWait", ""))
    parameters = config.get("SchedulerParameters", "").split(",")
    return waits is not None and int(waits[0]) > 0 and "reduce_completing_frag" not in parameters


def suspends_by_itself(config: Mapping[str, str]) -> bool:
    """Whether Slurm itself suspends and resumes jobs (gang scheduling, preemption by SUSPEND)."""
    mode = config.get("PreemptMode", "").upper()
    return "SUSPEND" in mode or "GANG" in mode


GANGS_NEED = ("MULTIPLE_SHARING_GRES_PJ", "ONE_TASK_PER_SHARING_GRES")
"""SelectTypeParameters without which no job can have part of every card of a node."""


def missing_for_gangs(config: Mapping[str, str]) -> list[str]:
    """Which of `GANGS_NEED` slurm.conf lacks."""
    found = config.get("SelectTypeParameters", "").upper().split(",")
    return [name for name in GANGS_NEED if name not in found]


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; `fields` has all that ``scontrol show partition`` says of it."""

    name: str
    max_time_s: int | None
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation. Times are unix times."""

    name: str
    nodes: tuple[str, ...]
    start_s: int
    end_s: int


def parse_partitions(output: str) -> list[Partition]:
    """``scontrol show partition -o``."""
    return [
        Partition(fields["PartitionName"], values.duration_s(fields.get("MaxTime", "")), fields)
        for fields in map(values.pairs, output.splitlines())
        if "PartitionName" in fields
    ]


def parse_reservations(output: str) -> list[Reservation]:
    """``scontrol show reservation -o``."""
    return [
        Reservation(
            name=fields["ReservationName"],
            nodes=expand(values.text(fields.get("Nodes", ""))),
            start_s=values.integer(fields.get("StartTime", "")) or 0,
            end_s=values.integer(fields.get("EndTime", "")) or 0,
        )
        for fields in map(values.pairs, output.splitlines())
        if "ReservationName" in fields
    ]
