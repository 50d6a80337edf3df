"""What slurmdbd remembers: one sacct call, explicit columns, one `AccountedJob` a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import intern

from slurm_gpushare.protocol.tag import Tag, parse_tag
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.runner import marked_rows
from slurm_gpushare.slurm.values import expand

COLUMNS = (
    "Submit", "JobIDRaw", "JobID", "Cluster", "UID", "User", "Account", "Partition", "State", "Eligible",
    "Start", "End", "ElapsedRaw", "TimelimitRaw", "NCPUS", "NodeList", "ReqTRES", "AllocTRES", "AdminComment",
)  # fmt: skip
"""A time is first: it says where a row begins."""


@dataclass(frozen=True, slots=True)
class AccountingQuery:
    """Which jobs to ask sacct for; empty fields do not limit."""

    jobs: Sequence[str] = ()
    start: str = ""
    """As sacct's -S takes it."""
    end: str = ""
    users: str = ""
    accounts: str = ""
    partitions: str = ""
    slurm_clusters: str = ""
    states: str = ""
    duplicates: bool = False
    """Also the earlier runs of requeued jobs."""


_TIMES = frozenset({"Submit", "Eligible", "Start", "End"})


def sacct_format(columns: Sequence[str]) -> str:
    """The option that names the columns. 22.05 cuts times to the width of a column, parsable or not."""
    return "--format=" + ",".join(f"{name}%64" if name in _TIMES else name for name in columns)


def sacct_arguments(query: AccountingQuery, delimiter: str) -> list[str]:
    """The sacct command line: allocations only, everybody's that we may see."""
    options = {
        "--jobs": ",".join(query.jobs),
        "--starttime": query.start,
        "--endtime": query.end,
        "--user": query.users,
        "--accounts": query.accounts,
        "--partition": query.partitions,
        "--clusters": query.slurm_clusters,
        "--state": query.states,
    }
    everybody = [] if query.users else ["--allusers"]
    return [
        "sacct", "--allocations", "--noheader", "--parsable", f"--delimiter={delimiter}",
        sacct_format(COLUMNS), *everybody, *(["--duplicates"] if query.duplicates else []),
        *(f"{name}={value}" for name, value in options.items() if value),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AccountedJob:
    """A job, or one task of an array, as accounting has it. Times are unix times."""

    raw_id: int
    key: str
    slurm_cluster: str
    uid: int
    user: str
    account: str
    partition: str
    state: str
    """The first word: ``CANCELLED by 0`` is ``CANCELLED``."""
    submit_s: int
    eligible_s: int | None
    start_s: int | None
    end_s: int | None
    elapsed_s: int
    limit_s: int | None
    cpus: int
    nodes: tuple[str, ...]
    gpus: int
    """Whole GPUs. Shards are not counted here."""
    shards: int
    """As accounted. 22.05 adds the shards of before an update to those of after it: take shares from our own record."""
    tag: Tag | None

    @property
    def cards(self) -> int:
        """Of a gang all of its node's, else 1: no other job shares."""
        return (self.tag.gang if self.tag else None) or 1


def _gres_count(tres: dict[str, str], name: str) -> int:
    return values.integer(tres.get(f"gres/{name}", "")) or 0


def _accounted(row: dict[str, str]) -> AccountedJob:
    allocated = values.tres(row["AllocTRES"]) or values.tres(row["ReqTRES"])
    limit_minutes = values.integer(row["TimelimitRaw"])
    nodes = values.text(row["NodeList"])
    uid = values.integer(row["UID"])
    return AccountedJob(
        raw_id=values.integer(row["JobIDRaw"]) or 0,
        key=row["JobID"].strip(),
        slurm_cluster=intern(row["Cluster"].strip()),
        uid=-1 if uid is None else uid,
        user=intern(values.text(row["User"])),
        account=intern(values.text(row["Account"])),
        partition=intern(row["Partition"].strip()),
        state=intern((row["State"].split() or [""])[0]),
        submit_s=values.integer(row["Submit"]) or 0,
        eligible_s=values.integer(row["Eligible"]),
        start_s=values.integer(row["Start"]),
        end_s=values.integer(row["End"]),
        elapsed_s=values.integer(row["ElapsedRaw"]) or 0,
        limit_s=None if limit_minutes is None else limit_minutes * 60,
        cpus=values.integer(row["NCPUS"]) or 0,
        nodes=() if nodes == "None assigned" else expand(nodes),
        gpus=_gres_count(allocated, "gpu"),
        shards=_gres_count(allocated, "shard"),
        tag=parse_tag(values.text(row["AdminComment"])),
    )


def parse_accounting(output: str, delimiter: str, mark: str) -> list[AccountedJob]:
    """The jobs in sacct's answer, whose times begin with `mark`."""
    return [_accounted(row) for row in marked_rows(output, COLUMNS, delimiter, mark)]


# Limits of QOS and associations that name TRES, from ``sacctmgr show``.


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
