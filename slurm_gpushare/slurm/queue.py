"""The queue: one squeue call, explicit columns, one `Job` for each job and array task.

squeue's own --array leaves out the last waiting task of an array with a step (``0-20:4``; 22.05 to 25.11), so the
waiting tasks of an array, which are one row, are told apart here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from sys import intern

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.tag import Tag, parse_tag
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.runner import format_option, rows, value_rows
from slurm_gpushare.slurm.values import Gres, expand, expand_tasks, gres_of_all, parse_gres, typed_shards

# Names that squeue -O has had unchanged from 22.05 to 26.05, but for the last two of the fourth line: a release that
# does not know a column says so on stderr and leaves it empty. Nothing that tells what a job is: no name, command,
# directory or path. No free text of users either: what they write into a comment is asked for apart.
COLUMNS = (
    "jobid", "jobarrayid", "arrayjobid", "arraytaskid", "hetjobid", "userid", "account", "partition",
    "qos", "reservation", "state", "reason", "prioritylong", "nice", "submittime", "eligibletime", "starttime",
    "endtime", "timelimit", "numnodes", "nodelist", "reqnodes", "feature", "excnodes", "oversubscribe", "exclusive",
    "dependency", "requeue", "restartcnt", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-socket",
    "tres-per-task", "cpus-per-tres", "mem-per-tres", "admin_comment",
)  # fmt: skip

COMMENT_COLUMNS = ("jobarrayid", "arrayjobid", "arraytaskid", "comment")
"""Asked for where a job has no tag; read for its gpushare: word alone."""
BATCH_COLUMNS = ("jobarrayid", "arrayjobid", "arraytaskid", "batchflag")
"""Asked for where a job has no tag, but a token."""
NAME_COLUMNS = ("jobarrayid", "arrayjobid", "arraytaskid", "name")
"""Of the caller's own jobs, for the caller's own screen."""

RUNNING = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"}
)

STANDING = frozenset({"SUSPENDED", "STOPPED"})


def squeue_arguments(jobs: str = "") -> list[str]:
    """The squeue command line; `jobs` limits it to a comma list of ids, of jobs that ended lately too."""
    only = [f"--jobs={jobs}", "--states=all"] if jobs else []
    return ["squeue", "--all", "--local", "--noheader", *only]


def squeue_settings(columns: Sequence[str], delimiter: str) -> dict[str, str]:
    """The columns, as a variable of squeue's environment: the same as ``--Format``, but nobody else can read it."""
    return {"SQUEUE_FORMAT2": format_option(columns, delimiter)}


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
    def given_s(self) -> float:
        """What we added to its time limit. A limit that is no longer than that was changed by somebody else since."""
        given_s = 60.0 * self.tag.given_min if self.tag else 0.0
        return 0.0 if self.limit_s is not None and given_s >= self.limit_s else given_s

    @property
    def opted_out(self) -> bool:
        """Whether its owner took it out of sharing: the hook then asks for the whole GPU in the job's own name.

        No hook can take the tag off, since only administrators write AdminComment; the helper does.
        """
        tagged = self.tag is not None and not self.tag.probe and self.tag.original == "gpu:1"
        return tagged and any(gres.name == "gpu" and gres.count for gres in parse_gres(self.per_job))

    @property
    def stands_still(self) -> bool:
        """Whether it is paused by us, or suspended or stopped by somebody else."""
        return self.state in STANDING or self.paused

    @property
    def paused(self) -> bool:
        """Whether its node keeps it standing still for us; Slurm says that it runs."""
        return self.running and self.tag is not None and self.tag.paused is not None

    def paused_s(self, now_s: float) -> float:
        """How long we have paused it, in all."""
        return self.tag.paused_s(now_s) if self.tag else 0.0

    def elapsed_s(self, now_s: float) -> float | None:
        """How long it has run, as Slurm counts: without the time in which we had it suspended. None: it does not."""
        if not self.running or self.start_s is None:
            return None
        return max(now_s - self.start_s - (self.tag.suspended_s(now_s) if self.tag else 0.0), 0.0)

    def begins_later(self, now_s: float) -> bool:
        """Whether its begin time, the user's or our lease's, is still to come."""
        return self.eligible_s is None or self.eligible_s > now_s

    def leased(self, now_s: float) -> bool:
        """Whether it is our own lease that it waits for."""
        return self.tag is not None and self.tag.lease and self.begins_later(now_s)

    @property
    def gres(self) -> tuple[Gres, ...]:
        """Everything of GRES that it asks for, however it asked."""
        return gres_of_all((self.per_job, self.per_node, self.per_socket, self.per_task))

    @property
    def shard(self) -> Gres | None:
        """The typed shards that put it on an exact GPU."""
        return typed_shards(self.per_node)

    @property
    def gang(self) -> int | None:
        """GPUs of a job that has, or asks for, shards of every card of a node; None: it is no gang."""
        return self.tag.gang if self.tag and self.shards_a_card else None

    @property
    def shards_a_card(self) -> int | None:
        """Of a gang, the shards that it asks of every card."""
        if self.tag is None or not self.tag.gang:
            return None
        asked = [gres for gres in self.gres if gres.count]
        by_task = [gres for gres in parse_gres(self.per_task) if gres.count]
        only_shards = len(asked) == 1 and asked == by_task and asked[0].name == "shard" and not asked[0].type
        return asked[0].count if only_shards else None


def number(value: str, default: int = 0) -> int:
    found = values.integer(value)
    return default if found is None else found


def _signed(value: str) -> int:
    value = value.strip()
    return -number(value[1:]) if value.startswith("-") else number(value)


def _exclusive(oversubscribe: str, exclusive: str) -> bool:
    """26.05 has a column of its own, and OverSubscribe=NO for every job; before, NO meant --exclusive."""
    return exclusive != "NO" if exclusive else oversubscribe not in {"OK", "YES"}


def _job(row: dict[str, str]) -> Job:
    allocated = values.tres(row["tres-alloc"])
    admin_comment = values.text(row["admin_comment"])
    task_id = values.integer(row["arraytaskid"])
    return Job(
        key=row["jobarrayid"].strip(),
        raw_id=number(row["jobid"]),
        array_id=values.integer(row["arrayjobid"]) if task_id is not None else None,
        task_id=task_id,
        het=number(row["hetjobid"]) > 0,
        uid=number(row["userid"], -1),
        account=values.text(row["account"]),
        partitions=tuple(row["partition"].strip().split(",")),
        qos=intern(values.text(row["qos"])),
        reservation=values.text(row["reservation"]),
        state=row["state"].strip(),
        reason=values.text(row["reason"]),
        priority=number(row["prioritylong"]),
        nice=_signed(row["nice"]),
        submit_s=number(row["submittime"]),
        eligible_s=values.integer(row["eligibletime"]),
        start_s=values.integer(row["starttime"]),
        end_s=values.integer(row["endtime"]),
        limit_s=values.duration_s(row["timelimit"]),
        num_nodes=number(row["numnodes"].split("-")[0], 1),
        nodes=expand(values.text(row["nodelist"])),
        wanted_nodes=values.text(row["reqnodes"]),
        excluded_nodes=expand(values.text(row["excnodes"])),
        features=values.text(row["feature"]),
        exclusive=_exclusive(row["oversubscribe"].strip(), row["exclusive"].strip()),
        dependency=values.text(row["dependency"]),
        requeue=row["requeue"].strip() == "1",
        restarts=number(row["restartcnt"]),
        cpus=number(allocated.get("cpu", ""), 1),
        mem_mib=values.memory_mib(allocated.get("mem", "")) or 0,
        per_job=values.text(row["tres-per-job"]),
        per_node=values.text(row["tres-per-node"]),
        per_socket=values.text(row["tres-per-socket"]),
        per_task=values.text(row["tres-per-task"]),
        per_gpu_extras=any("gpu" in row[column] for column in ("cpus-per-tres", "mem-per-tres")),
        admin_comment=admin_comment,
        tag=parse_tag(admin_comment),
    )


def jobs_of_row(row: dict[str, str]) -> tuple[Job, ...]:
    """The job of a row, or the waiting tasks of an array that it stands for."""
    job = _job(row)
    if "[" not in job.key:
        return (job,)
    array_id = number(row["arrayjobid"])
    return tuple(replace(job, key=f"{array_id}_{task}", array_id=array_id, task_id=task) for task in _tasks(row))


def _tasks(row: dict[str, str]) -> tuple[int, ...]:
    try:
        return expand_tasks(row["arraytaskid"])
    except ValueError as why:
        raise SlurmError(f"cannot read Slurm's answer: {why}", "This Slurm release is not known.") from why


def parse_queue(output: str, delimiter: str, wanted: Collection[str] = ()) -> list[Job]:
    """The jobs in squeue's answer; of arrays of which single tasks are `wanted`, only those."""
    jobs = [job for row in rows(output, COLUMNS, delimiter) for job in jobs_of_row(row)]
    arrays = {key.partition("_")[0] for key in wanted if "_" in key} - set(wanted)
    return [job for job in jobs if str(job.array_id) not in arrays or job.key in wanted or str(job.raw_id) in wanted]


def parse_texts(output: str, columns: Sequence[str], delimiter: str) -> dict[str, str]:
    """The users' text in the last column, by job and array task."""
    found: dict[str, str] = {}
    for row in rows(output, columns, delimiter):
        key, text = row["jobarrayid"].strip(), values.text(row[columns[-1]])
        keys = [f"{number(row['arrayjobid'])}_{task}" for task in _tasks(row)] if "[" in key else [key]
        found.update(dict.fromkeys(keys, text))
    return found


# The queue, read again and again: most of it is as it was at the last look.


# What Slurm works out anew every few minutes for jobs that nobody has touched.
_VOLATILE = tuple(COLUMNS.index(name) for name in ("prioritylong", "starttime", "endtime"))


class QueueReader:
    """Parses the queue again and again: rows that are as they were last time are not parsed again.

    Of ten thousand waiting jobs a handful changes from one look to the next.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[str, ...], tuple[Job, ...]]] = {}

    def parse(self, output: str, delimiter: str) -> list[Job]:
        """The jobs in squeue's answer; the same object for one that has not changed."""
        known, now = self._known, {}
        jobs: list[Job] = []
        for row in value_rows(output, len(COLUMNS), delimiter):
            volatile = tuple([row[at] for at in _VOLATILE])
            for at in _VOLATILE:
                row[at] = ""
            text = "\0".join(row)
            found = known.get(text)
            if found is None:
                for at, value in zip(_VOLATILE, volatile, strict=True):
                    row[at] = value
                found = volatile, jobs_of_row(dict(zip(COLUMNS, row, strict=True)))
            elif found[0] != volatile:
                priority, start, end = number(volatile[0]), values.integer(volatile[1]), values.integer(volatile[2])
                changed = (replace(job, priority=priority, start_s=start, end_s=end) for job in found[1])
                found = volatile, tuple(changed)
            now[text] = found
            jobs.extend(found[1])
        self._known = now
        return jobs
