"""What slurmdbd remembers: jobs (one sacct call, explicit columns, one `AccountedJob` a row), whose they were and with
which token, and the limits of QOS and associations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import TYPE_CHECKING

from slurm_gpushare.protocol.tag import Tag, clear_consent, parse_tag, with_tag, without_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import AccountingDown, marked_rows
from slurm_gpushare.slurm.values import expand

if TYPE_CHECKING:
    from slurm_gpushare.slurm.commands import Slurm

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


def sacct_arguments(query: AccountingQuery, delimiter: str, columns: Sequence[str] = COLUMNS) -> list[str]:
    """The sacct command line: allocations only, everybody's that we may see.

    22.05 cuts times to the width of a column, parsable or not.
    """
    asked = ",".join(f"{name}%64" if name in _TIMES else name for name in columns)
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
        f"--format={asked}", *everybody, *(["--duplicates"] if query.duplicates else []),
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
    admin_comment: str = ""
    tres: str = ""
    """AllocTRES, as sacct wrote it."""

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
        admin_comment=values.text(row["AdminComment"]),
        tres=intern(values.text(row["AllocTRES"])),
    )


def parse_accounting(output: str, delimiter: str, mark: str) -> list[AccountedJob]:
    """The jobs in sacct's answer, whose times begin with `mark`."""
    return [_accounted(row) for row in marked_rows(output, COLUMNS, delimiter, mark)]


ENDED = "CA,CD,DL,F,NF,OOM,PR,TO,BF"
"""States of jobs that are over, as sacct's --state takes them."""


def without_token(admin_comment: str) -> str:
    """What is left of an AdminComment once its job has ended: no token, which would link its owner's runs.

    Beside the summary of jobstats nothing of ours is left: it and reportseff read it only where it stands alone.
    """
    tag = parse_tag(admin_comment)
    if tag is None or "JS1:" in admin_comment:
        return without_tag(admin_comment)
    return with_tag(admin_comment, replace(tag, token=None))


# Limits of QOS and associations that name TRES, from ``sacctmgr show``.


_BOTH = ("GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins")
LIMIT_COLUMNS = {
    "qos": (("Name",), (*_BOTH, "MaxTRESPerUser", "MaxTRESPerAccount", "MinTRES")),
    "assoc": (("Account", "User", "Partition"), _BOTH),
}
"""What names an entity of each kind, and its limits."""


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


@dataclass(frozen=True, slots=True)
class Qos:
    """What a QOS says of preemption."""

    name: str
    preempts: frozenset[str]
    """Names of the QOS whose jobs its own may preempt."""
    mode: str
    """``REQUEUE``, ``CANCEL``, ``OFF`` and their like; empty: as the cluster's."""
    grace_s: float
    exempt_s: float | None
    """How long its jobs run before they can be preempted; None: as the cluster says."""


QOS_COLUMNS = ("Name", "Preempt", "PreemptMode", "GraceTime", "PreemptExemptTime")


def parse_qos(output: str) -> list[Qos]:
    """The QOS in sacctmgr's answer for `QOS_COLUMNS`."""
    found = []
    for name, preempts, mode, grace, exempt in (line.split("|")[:5] for line in output.splitlines() if "|" in line):
        mode = "" if mode.lower() == "cluster" else mode.upper()
        exempt_s = values.duration_s(exempt) if exempt else None
        found.append(
            Qos(name, frozenset(filter(None, preempts.split(","))), mode, values.duration_s(grace) or 0, exempt_s)
        )
    return found


def sacctmgr_arguments(kind: str, columns: Iterable[str]) -> list[str]:
    """The sacctmgr command line that lists all entities of `kind`."""
    return ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", kind, f"format={','.join(columns)}"]


def parse_limits(kind: str, output: str) -> list[Limit]:
    """The limits in sacctmgr's answer. Names of QOS and accounts cannot hold its delimiter."""
    keys, names = LIMIT_COLUMNS[kind]
    found = []
    for line in output.splitlines():
        cells = line.split("|")
        owner = {key.lower(): cell for key, cell in zip(keys, cells, strict=False) if cell}
        for name, cell in zip(names, cells[len(keys) :], strict=False):
            if tres := values.tres(cell):
                found.append(Limit(kind, owner, name, tres))
    return found


# Whose job was it, and with which token? Asked when a telemetry record arrives.


# sacct's command line holds every id: keep it well under the kernel's limit for one argument.
_AT_ONCE = 5_000
_REMEMBERED = 10_000
"""Of jobs that ended long ago accounting is asked: remembering more would fill memory for months."""


def _owned(job: Job | AccountedJob, comment: str) -> OwnedToken:
    """The token is the tag's; of a job that nobody tagged (no hook, no helper) it is its owner's own word.

    The same goes for a job whose owner took the token off.
    """
    out = isinstance(job, Job) and job.opted_out
    if job.tag and not out:
        return OwnedToken(job.tag.token, job.uid)
    consent = clear_consent(comment)
    return OwnedToken(consent.token if consent else None, job.uid)


KeptTokens = Callable[[Sequence[AccountedJob]], Mapping[int, OwnedToken]]


class JobTokens:
    """Tags by SLURM_JOB_ID: from the queue, else from accounting, which never forgets."""

    def __init__(self, slurm: Slurm, kept: KeptTokens = lambda jobs: {}) -> None:
        """`kept` knows what the helper has taken out of accounting."""
        self._slurm, self._kept = slurm, kept
        self._known: dict[int, OwnedToken] = {}
        self._untagged: dict[int, Job] = {}
        """Their tokens, if they have one, are in their comments, which are asked for when a record comes."""

    def take(self, queue: Iterable[Job]) -> None:
        """Use a queue that was read anyway instead of asking again; jobs that were running in it are remembered.

        Most records are of jobs that ended since the last look: accounting need not be asked about them.
        """
        for job in queue:
            if job.running and job.tag is not None and not job.opted_out:
                self._known[job.raw_id] = _owned(job, "")
            elif job.running:  # never tagged, or its owner has taken the token off
                self._known.pop(job.raw_id, None)
                self._untagged[job.raw_id] = job
        _forget_oldest(self._known)
        _forget_oldest(self._untagged)

    def resolve(self, raw_ids: Iterable[int]) -> dict[int, OwnedToken]:
        """Those of the jobs that Slurm knows; the rest are absent: ask again later, or give them up."""
        wanted = set(raw_ids)
        missing = sorted(wanted - self._known.keys())
        if missing and not self._known and not self._untagged:
            self.take(self._slurm.jobs())
        self._read_comments(wanted)
        missing = sorted(wanted - self._known.keys())
        found = {raw_id: self._known[raw_id] for raw_id in wanted & self._known.keys()}
        for first in range(0, len(missing), _AT_ONCE):
            chunk = [str(raw_id) for raw_id in missing[first : first + _AT_ONCE]]
            try:
                answer = self._slurm.accounting(AccountingQuery(jobs=chunk))
                accounted = [job for job in answer if job.raw_id in wanted and _is_whole(job)]
                untagged = [str(job.raw_id) for job in accounted if job.tag is None]
                comments = self._slurm.accounted_comments(untagged) if untagged else {}
            except AccountingDown:
                break
            found.update((job.raw_id, _owned(job, comments.get(job.raw_id, ""))) for job in accounted)
            found.update(self._kept([job for job in accounted if job.tag is None or not job.tag.token]))
        return found

    def _read_comments(self, wanted: set[int]) -> None:
        """The comments of untagged jobs that ended lately are still in the queue."""
        jobs = [self._untagged[raw_id] for raw_id in sorted(wanted & self._untagged.keys())][:_AT_ONCE]
        comments = self._slurm.comments([job.key for job in jobs]) if jobs else {}
        for job in jobs:
            del self._untagged[job.raw_id]
            if job.key in comments:
                self._known[job.raw_id] = _owned(job, comments[job.key])


def _is_whole(job: AccountedJob) -> bool:
    """Whether slurmdbd has been told of the job itself.

    News of its steps or of its end can come first: until the rest does, it has no partition, and root as its owner.
    """
    return bool(job.partition)


def _forget_oldest(jobs: dict[int, OwnedToken] | dict[int, Job]) -> None:
    for raw_id in list(jobs)[: max(0, len(jobs) - _REMEMBERED)]:
        del jobs[raw_id]
