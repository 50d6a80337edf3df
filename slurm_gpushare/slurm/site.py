"""What a site set up: configuration, partitions, reservations, from ``scontrol show``."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.hostlist import expand

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


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; `fields` has all that ``scontrol show partition`` says of it."""

    name: str
    nodes: tuple[str, ...]
    max_time_s: int | None
    up: bool
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
    found = []
    for line in output.splitlines():
        fields = values.pairs(line)
        if "PartitionName" in fields:
            found.append(
                Partition(
                    name=fields["PartitionName"],
                    nodes=expand(values.text(fields.get("Nodes", ""))),
                    max_time_s=values.duration_s(fields.get("MaxTime", "")),
                    up=fields.get("State") == "UP",
                    fields=fields,
                )
            )
    return found


def parse_reservations(output: str) -> list[Reservation]:
    """``scontrol show reservation -o``."""
    found = []
    for line in output.splitlines():
        fields = values.pairs(line)
        if "ReservationName" in fields:
            found.append(
                Reservation(
                    name=fields["ReservationName"],
                    nodes=expand(values.text(fields.get("Nodes", ""))),
                    start_s=values.integer(fields.get("StartTime", "")) or 0,
                    end_s=values.integer(fields.get("EndTime", "")) or 0,
                )
            )
    return found
