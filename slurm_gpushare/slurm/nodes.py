"""What the cluster has: nodes (one sinfo call, one `Node` a name), partitions, reservations, and its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.runner import format_option, rows
from slurm_gpushare.slurm.values import Gres, Usage, expand, parse_gres, parse_used, type_index

COLUMNS = (
    "nodelist", "statecomplete", "gres", "gresused", "features_act", "cpusstate", "allocmem", "memory", "partitionname",
)  # fmt: skip

# As sinfo's StateComplete writes them. A node in one of these starts no job, or none of ours.
_UNUSABLE = frozenset(
    {
        "down", "drain", "drained", "draining", "fail", "failing", "fail_", "error", "unknown", "future", "maint",
        "not_responding", "powered_down", "powering_down", "powering_up", "power_down", "power_up", "reboot_issued",
        "reboot_requested", "blocked", "inval", "invalid_reg", "undrain",
    }
)  # fmt: skip


def sinfo_arguments(delimiter: str, nodes: str = "") -> list[str]:
    """The sinfo command line; `nodes` limits it to a comma list of names."""
    only = [f"--nodes={nodes}"] if nodes else []
    return ["sinfo", "--all", "--local", "--Node", "--noheader", *only, f"--Format={format_option(COLUMNS, delimiter)}"]


WITHOUT_SHARDS = (
    "Check gres.conf's shard line. On 22.05 a restart of slurmctld loses the shards in use: drain the shared nodes, "
    "restart slurmctld once they are empty, resume them, and 'scontrol release' the jobs that wait with BadConstraints."
)
"""What to do where a node has fewer shards than gpushare.conf says."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as slurmctld has it now."""

    name: str
    states: frozenset[str]
    """``mixed``, ``idle+drain``, ...: the words of StateComplete."""
    responding: bool
    gres: tuple[Gres, ...]
    usage: Usage
    features: tuple[str, ...]
    cpus: int
    cpus_alloc: int
    mem_mib: int
    mem_alloc_mib: int
    partitions: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether Slurm may start a job here now."""
        return self.responding and not self.states & _UNUSABLE

    @property
    def reserved(self) -> bool:
        return "reserved" in self.states

    @property
    def gpus(self) -> dict[int, str]:
        """GPU index -> its own GRES type (``v100_2``), for GPUs that are typed by index."""
        return {
            index: gres.type
            for gres in self.gres
            if gres.name == "gpu" and gres.count == 1 and (index := type_index(gres.type)) is not None
        }

    @property
    def shards_per_gpu(self) -> dict[int, int]:
        """GPU index -> shards that Slurm divides it into. Absent or 0: none, or lost (22.05 after a restart)."""
        return {
            index: gres.count
            for gres in self.gres
            if gres.name == "shard" and (index := type_index(gres.type)) is not None
        }

    def lost_shards(self, shards_per_gpu: int) -> list[int]:
        """GPU indices that Slurm divides into fewer shards than it should: jobs for them wait for ever."""
        return [index for index in sorted(self.gpus) if self.shards_per_gpu.get(index, 0) < shards_per_gpu]


def _node(row: dict[str, str], release: Release) -> Node:
    state = row["statecomplete"].strip().lower()
    words = frozenset(word.strip("*~#!%$@^-+") for word in state.split("+"))
    cpus = [int(number) for number in row["cpusstate"].strip().split("/") if number.isdecimal()]
    return Node(
        name=row["nodelist"].strip(),
        states=words,
        responding="*" not in state and "not_responding" not in words,
        gres=parse_gres(row["gres"]),
        usage=parse_used(row["gresused"], exact=release.can("counts_shards_per_gpu")),
        features=tuple(feature for feature in values.text(row["features_act"]).split(",") if feature),
        cpus=cpus[3] if len(cpus) == 4 else 0,
        cpus_alloc=cpus[0] if len(cpus) == 4 else 0,
        mem_mib=values.memory_mib(row["memory"]) or 0,
        mem_alloc_mib=values.memory_mib(row["allocmem"]) or 0,
        partitions=(row["partitionname"].strip(),),
    )


def parse_nodes(output: str, delimiter: str, release: Release) -> list[Node]:
    """The nodes in sinfo's answer; a node of several partitions comes in several rows."""
    found: dict[str, Node] = {}
    for row in rows(output, COLUMNS, delimiter):
        node = _node(row, release)
        earlier = found.get(node.name)
        found[node.name] = replace(node, partitions=earlier.partitions + node.partitions) if earlier else node
    return list(found.values())


# Configuration, partitions and reservations, from ``scontrol show``.


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


def hides_jobs(config: Mapping[str, str]) -> bool:
    """Whether users see their own jobs only (PrivateData=jobs)."""
    return "jobs" in config.get("PrivateData", "").lower().split(",")


def slurm_user(config: Mapping[str, str]) -> SlurmUser:
    """From ``SlurmUser = slurm(64030)``."""
    name, _, uid = config.get("SlurmUser", "slurm").rstrip(")").partition("(")
    return SlurmUser(name, int(uid) if uid.isdecimal() else None)


def completing_stops_everybody(config: Mapping[str, str]) -> bool:
    """Whether a job in its epilog keeps the main scheduler from starting anything anywhere."""
    waits = re.match(r"\d+", config.get("CompleteWait", ""))
    parameters = config.get("SchedulerParameters", "").split(",")
    return waits is not None and int(waits[0]) > 0 and "reduce_completing_frag" not in parameters


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
