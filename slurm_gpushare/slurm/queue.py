"""The queue: one squeue call, explicit columns, one `Job` a row (array tasks one by one)."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.gres import Gres, parse_gres, typed_shards
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.table import format_option, rows
from slurm_gpushare.slurm.tag import Tag, parse_tag

# Names that squeue -O has had unchanged from 22.05 to 26.05, but for the last two of the fourth line: a release that
# does not know a column says so on stderr and leaves it empty. Nothing that tells what a job is: no name, command,
# directory or path. The comment is read for its gpushare: word alone.
COLUMNS = (
    "jobid", "jobarrayid", "arrayjobid", "arraytaskid", "hetjobid", "userid", "account", "partition", "qos",
    "reservation", "state", "reason", "prioritylong", "nice", "submittime", "eligibletime", "starttime", "endtime",
    "timelimit", "numnodes", "nodelist", "reqnodes", "feature", "excnodes", "oversubscribe", "exclusive",
    "dependency", "requeue", "restartcnt", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-socket",
    "tres-per-task", "cpus-per-tres", "mem-per-tres", "admin_comment", "comment",
)  # fmt: skip

RUNNING = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"}
)


def squeue_arguments(delimiter: str, jobs: str = "") -> list[str]:
    """The squeue command line; `jobs` limits it to a comma list of ids, of jobs that ended lately too."""
    only = [f"--jobs={jobs}", "--states=all"] if jobs else []
    return [
        "squeue",
        "--all",
        "--local",
        "--array",
        "--noheader",
        *only,
        f"--Format={format_option(COLUMNS, delimiter)}",
    ]


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or one task of an array, as slurmctld has it now. Times are unix times."""

    key: str
    """As squeue prints it and scontrol takes it: ``14``, the array task ``6_2``, the component ``9+1``."""
    raw_id: int
    """SLURM_JOB_ID. The pending tasks of one array share it: use `key` to name a pending job."""
    array_id: int | None
    task_id: int | None
    het: bool
    uid: int
    account: str
    partitions: tuple[str, ...]
    qos: str
    reservation: str
    state: str
    reason: str
    priority: int
    nice: int
    submit_s: int
    eligible_s: int | None
    start_s: int | None
    """When it started; of a pending job when Slurm expects it to, if it says so."""
    end_s: int | None
    limit_s: int | None
    num_nodes: int
    nodes: tuple[str, ...]
    wanted_nodes: str
    """The node list (-w) in force; a placement of ours writes it too."""
    excluded_nodes: tuple[str, ...]
    """Nodes that the user ruled out (-x). 22.05 does not tell."""
    features: str
    exclusive: bool
    dependency: str
    requeue: bool
    restarts: int
    cpus: int
    mem_mib: int
    per_job: str
    per_node: str
    per_socket: str
    per_task: str
    per_gpu_extras: bool
    """Whether --cpus-per-gpu or --mem-per-gpu is in force, which shards cannot carry."""
    admin_comment: str
    comment: str
    tag: Tag | None

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def running(self) -> bool:
        """Whether it holds its resources."""
        return self.state in RUNNING

    @property
    def held(self) -> bool:
        return self.pending and (self.priority == 0 or self.reason.startswith("JobHeld"))

    @property
    def gres(self) -> tuple[Gres, ...]:
        """Everything of GRES that it asks for, however it asked."""
        asked = (self.per_job, self.per_node, self.per_socket, self.per_task)
        return tuple(gres for value in asked for gres in parse_gres(value))

    @property
    def shard(self) -> Gres | None:
        """The typed shards that put it on an exact GPU."""
        return typed_shards(self.per_node)


def _number(value: str, default: int = 0) -> int:
    found = values.integer(value)
    return default if found is None else found


def _signed(value: str) -> int:
    value = value.strip()
    return -_number(value[1:]) if value.startswith("-") else _number(value)


def _exclusive(oversubscribe: str, exclusive: str) -> bool:
    """26.05 has a column of its own, and OverSubscribe=NO for every job; before, NO meant --exclusive."""
    return exclusive != "NO" if exclusive else oversubscribe not in {"OK", "YES"}


def _job(row: dict[str, str]) -> Job:
    allocated = values.tres(row["tres-alloc"])
    admin_comment = values.text(row["admin_comment"])
    task_id = values.integer(row["arraytaskid"])
    return Job(
        key=row["jobarrayid"].strip(),
        raw_id=_number(row["jobid"]),
        array_id=values.integer(row["arrayjobid"]) if task_id is not None else None,
        task_id=task_id,
        het=_number(row["hetjobid"]) > 0,
        uid=_number(row["userid"], -1),
        account=values.text(row["account"]),
        partitions=tuple(row["partition"].strip().split(",")),
        qos=values.text(row["qos"]),
        reservation=values.text(row["reservation"]),
        state=row["state"].strip(),
        reason=values.text(row["reason"]),
        priority=_number(row["prioritylong"]),
        nice=_signed(row["nice"]),
        submit_s=_number(row["submittime"]),
        eligible_s=values.integer(row["eligibletime"]),
        start_s=values.integer(row["starttime"]),
        end_s=values.integer(row["endtime"]),
        limit_s=values.duration_s(row["timelimit"]),
        num_nodes=_number(row["numnodes"].split("-")[0], 1),
        nodes=expand(values.text(row["nodelist"])),
        wanted_nodes=values.text(row["reqnodes"]),
        excluded_nodes=expand(values.text(row["excnodes"])),
        features=values.text(row["feature"]),
        exclusive=_exclusive(row["oversubscribe"].strip(), row["exclusive"].strip()),
        dependency=values.text(row["dependency"]),
        requeue=row["requeue"].strip() == "1",
        restarts=_number(row["restartcnt"]),
        cpus=_number(allocated.get("cpu", ""), 1),
        mem_mib=values.memory_mib(allocated.get("mem", "")) or 0,
        per_job=values.text(row["tres-per-job"]),
        per_node=values.text(row["tres-per-node"]),
        per_socket=values.text(row["tres-per-socket"]),
        per_task=values.text(row["tres-per-task"]),
        per_gpu_extras=any("gpu" in row[column] for column in ("cpus-per-tres", "mem-per-tres")),
        admin_comment=admin_comment,
        comment=values.text(row["comment"]),
        tag=parse_tag(admin_comment),
    )


def parse_queue(output: str, delimiter: str) -> list[Job]:
    """The jobs in squeue's answer."""
    return [_job(row) for row in rows(output, COLUMNS, delimiter)]
