"""The optional backend: the queue through libslurm, for the one Slurm release on which the contract test has passed.

It only reads, and only the queue: pyslurm's nodes do not say which GPU is in use, and its changes fail without a word.
What it cannot say of a job, and any record that it cannot give, is asked of squeue.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release, parse_release
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import RUNNING, Job
from slurm_gpushare.slurm.runner import ControllerDown, ScontrolSession
from slurm_gpushare.slurm.values import expand, expand_tasks

TRIED = (25, 11)
"""The release (year, month) of pyslurm and of Slurm on which both backends were seen to say the same."""
_BAD_RECORD = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_LOG = logging.getLogger("gpushare")


def why_not(release: Release, config: Callable[[], Mapping[str, str]]) -> str | None:
    """Why pyslurm cannot serve this Slurm, or None if it can. `config` asks for slurm.conf, if all else fits.

    The package's own data tell: to import a pyslurm that does not fit may end the process.
    """
    try:
        version = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed"
    tried = f"{TRIED[0]}.{TRIED[1]:02d}"
    try:
        made_for = parse_release(version)
    except SlurmError:
        return f"its version '{version}' does not say for which Slurm it was made"
    if (made_for.year, made_for.month) != TRIED:
        return f"it is made for Slurm {made_for.year}.{made_for.month:02d}, and only {tried} has been tried"
    if (release.year, release.month) != TRIED:
        return f"it is made for Slurm {tried}, and this is {release}"
    if "gres/gpu" not in config().get("AccountingStorageTRES", "").lower().split(","):
        return "it does not say which waiting jobs ask for GPUs, since AccountingStorageTRES has no gres/gpu"
    return None


MOST_JOBS = 120
"""In a longer queue squeue is faster (25.11: 1.6 against 4.1 ms for 27 jobs, 63 against 28 for 1,500 that wait)."""
ASKED_ANEW_S = 60.0
"""So often squeue is asked again about a request that does not seem to have changed: a type of GPU may have."""


class PyslurmSlurm(Slurm):
    """A queue of at most `MOST_JOBS` from libslurm; every other question and every change through the commands."""

    name = "pyslurm"

    def __init__(
        self,
        run: Callable[..., str] = runner.run,
        library: Any = None,
        session: ScontrolSession | None = None,
    ) -> None:
        super().__init__(run, session)
        os.environ["SLURM_BITSTR_LEN"] = "0"  # else libslurm cuts the waiting tasks of an array at 64 characters
        self._pyslurm = importlib.import_module("pyslurm") if library is None else library
        self._last_length = 0
        self._requests: dict[object, Job] = {}
        """squeue's answers, by all that the record says of the request."""
        self._asked_s = time.monotonic()

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        if wanted := list(only):
            return super().jobs(wanted)  # squeue also finds jobs that ended
        found = super().jobs() if self._last_length > MOST_JOBS else self._load()
        self._last_length = len(found)
        return found

    def _load(self) -> list[Job]:
        self.calls += 1
        try:
            records = list(self._pyslurm.Jobs.load().values())
        except self._pyslurm.RPCError as error:
            raise ControllerDown(f"pyslurm: {error}") from error
        except _BAD_RECORD as error:
            _LOG.warning('event=pyslurm error=%s message="squeue is asked instead"', type(error).__name__)
            return super().jobs()
        return self._joined(records)

    def _joined(self, records: Iterable[Any]) -> list[Job]:
        """The records' jobs; those that pyslurm cannot tell come from squeue, in one question."""
        found: list[Job] = []
        partly: dict[int, tuple[object, tuple[Job, ...]]] = {}
        unreadable: list[str] = []
        for record in records:
            try:
                if not listed(record):
                    continue
                job = base_job(record)
                jobs = jobs_of(job, record.array_tasks_waiting or "")
                if unsure(record):
                    partly[record.id] = request_of(record, job), jobs
                else:
                    found += jobs
            except _BAD_RECORD as error:
                _LOG.warning("event=pyslurm job=%s error=%s", record.id, type(error).__name__)
                unreadable.append(str(record.id))
        if time.monotonic() - self._asked_s > ASKED_ANEW_S:
            self._requests, self._asked_s = {}, time.monotonic()
        ask = [str(raw_id) for raw_id, (request, _) in partly.items() if request not in self._requests]
        answered = super().jobs([*ask, *unreadable]) if ask or unreadable else []
        found += [job for job in answered if str(job.raw_id) in unreadable]
        by_id = {job.raw_id: job for job in answered}
        earlier, self._requests = self._requests, {}
        for raw_id, (request, jobs) in partly.items():
            if answer := earlier.get(request) or by_id.get(raw_id):  # else it ended between the two questions
                self._requests[request] = answer
                asked: dict[str, Any] = {name: getattr(answer, name) for name in _REQUEST}
                found += [replace(job, **asked) for job in jobs]
        return found


_REQUEST = ("per_job", "per_node", "per_socket", "per_task", "per_gpu_extras")


# One ``pyslurm.Job`` of pyslurm 25.11 as the `Job` that squeue's answer would give.
#
# What pyslurm leaves out cannot be guessed: ``--gpus`` and ``--gpus-per-socket`` come without type and cannot be told
# apart, and ``--mem-per-gpu`` looks like ``--mem``. `unsure` says where that may matter, so that squeue is asked.


_SHARED = frozenset({"OK", "YES"})


def listed(record: Any) -> bool:
    """Whether squeue would list it: pyslurm also has jobs that ended lately."""
    return record.state == "PENDING" or record.state in RUNNING


def unsure(record: Any) -> bool:
    """Whether the request must be asked of squeue: a GPU that nothing explains, or that shards might not carry."""
    if record.requested_tres is None or not record.requested_tres.gres:
        return False
    explained = record.gres_per_node or (record.tres_per_task and record.tres_per_task.gres)
    return not explained or record.cpus_per_task is None or parse_tag(record.admin_comment or "") is not None


def request_of(record: Any, job: Job) -> object:
    """All that a record says of its request: what changes when somebody changes the request."""
    gres = tuple((str(name), item.count) for name, item in record.requested_tres.gres.items())
    asked = (job.per_node, job.per_task, job.per_gpu_extras, gres)
    return job.raw_id, asked, job.cpus, job.mem_mib, job.num_nodes, job.features, job.admin_comment


def jobs_of(job: Job, waiting: str) -> tuple[Job, ...]:
    """The job, or the `waiting` tasks of the array that it stands for."""
    if not waiting:
        return (job,)
    return tuple(replace(job, key=f"{job.array_id}_{task}", task_id=task) for task in expand_tasks(waiting))


def base_job(record: Any) -> Job:
    """The `Job` of a record; of an array's waiting tasks what they have in common, and the array's id."""
    admin_comment = record.admin_comment or ""
    key, task_id = _key(record)
    return Job(
        key=key,
        raw_id=record.id,
        array_id=record.array_id,
        task_id=task_id,
        het=bool(record.heterogeneous_id),
        uid=record.user_id,
        account=record.account or "",
        partitions=tuple((record.partition or "").split(",")),
        qos=record.qos or "",
        reservation=record.reservation or "",
        state=record.state,
        reason="" if record.state_reason in (None, "None") else record.state_reason,
        priority=record.priority or 0,
        nice=record.nice or 0,
        submit_s=record.submit_time or 0,
        eligible_s=record.eligible_time or None,
        start_s=record.start_time or None,
        end_s=_end_s(record),
        limit_s=record.time_limit * 60 if isinstance(record.time_limit, int) else None,
        num_nodes=record.num_nodes or 1,
        nodes=expand(record.allocated_nodes or ""),
        wanted_nodes=record.required_nodes or "",
        excluded_nodes=expand(record.excluded_nodes or ""),
        features="&".join(record.constraints or ()),
        exclusive=record.resource_sharing not in _SHARED,
        dependency=_dependency(record.dependencies),
        requeue=bool(record.is_requeueable),
        restarts=record.requeue_count or 0,
        cpus=record.cpus or 1,
        mem_mib=_memory_mib(record),
        per_job="",
        per_node=",".join(f"{name}:{count}" for name, count in (record.gres_per_node or {}).items()),
        per_socket="",
        per_task=_per_task(record.tres_per_task),
        per_gpu_extras=record.cpus_per_task is None,
        admin_comment=admin_comment,
        tag=parse_tag(admin_comment),
    )


def _key(record: Any) -> tuple[str, int | None]:
    if record.array_id is not None:  # task 0 comes as None
        task = record.array_task_id or 0
        return f"{record.array_id}_{task}", task
    if record.heterogeneous_id:
        return f"{record.heterogeneous_id}+{record.heterogeneous_offset or 0}", None
    return str(record.id), None


def _end_s(record: Any) -> int | None:
    """Of a job without a limit pyslurm says a year from now, until it has ended."""
    endless = not isinstance(record.time_limit, int) and listed(record)
    return None if endless else record.end_time or None


def _memory_mib(record: Any) -> int:
    tres = record.allocated_tres or record.requested_tres
    return int(tres.mem.count) if tres is not None and tres.mem is not None else 0


def _per_task(tres: Any) -> str:
    if tres is None:
        return ""
    cpu = [f"cpu={tres.cpu.count}"] if tres.cpu is not None else []
    return ",".join([*cpu, *(f"{item.type_and_name}={item.count}" for item in tres.gres.values())])


def _dependency(found: Any) -> str:
    """What it waits for. A mapping in which nothing is named is a singleton that waits."""
    if found is None:
        return ""
    between = "?" if found.get("satisfy") == "any" else ","
    named = [f"{kind}:{one}" for kind, ids in found.items() if isinstance(ids, list) for one in ids]
    return between.join(named) or "singleton(unfulfilled)"
