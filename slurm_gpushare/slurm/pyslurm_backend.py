"""The optional backend: the queue through libslurm, for the one Slurm release that the installed pyslurm fits.

It reads the queue without starting a process and hands every other question to the commands: pyslurm's nodes
do not say which GPU is in use. Written against pyslurm 25.11, the only one on PyPI; the translation below
is tested on objects of the same shape, since the library itself only loads beside that release.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.commands import CommandSlurm
from slurm_gpushare.slurm.errors import ControllerDown, SlurmError
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.limits import Limit
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.release import Release, parse_release
from slurm_gpushare.slurm.site import Partition, Reservation
from slurm_gpushare.slurm.tag import parse_tag


def why_not(release: Release) -> str | None:
    """Why pyslurm cannot serve this Slurm, or None if it can."""
    try:
        pyslurm = importlib.import_module("pyslurm")
    except ImportError as error:
        return f"it is not installed ({error})"
    try:
        made_for = parse_release(str(pyslurm.__version__))
    except (AttributeError, SlurmError):
        return "it does not say which Slurm it was made for"
    if (made_for.year, made_for.month) != (release.year, release.month):
        return f"it is made for Slurm {made_for.year}.{made_for.month:02d}, and this is {release}"
    return None


def _gres(tres: Any) -> str:
    if tres is None:
        return ""
    return ",".join(f"gres/{name}:{item.count}" for name, item in tres.gres.items())


def _tasks(job: Any) -> Iterator[tuple[str, int | None]]:
    """The keys of what one record stands for: a job, a task, or the waiting tasks of an array."""
    if job.array_task_id is not None:
        yield f"{job.array_id}_{job.array_task_id}", job.array_task_id
    elif job.array_tasks_waiting:
        for task in expand(f"[{job.array_tasks_waiting}]"):
            yield f"{job.array_id}_{task}", int(task)
    elif job.heterogeneous_id:
        yield f"{job.heterogeneous_id}+{job.heterogeneous_offset or 0}", None
    else:
        yield str(job.id), None


def translate(job: Any) -> Iterator[Job]:
    """The `Job`s that a ``pyslurm.Job`` stands for."""
    admin_comment = job.admin_comment or ""
    for key, task_id in _tasks(job):
        yield Job(
            key=key,
            raw_id=job.id,
            array_id=job.array_id if task_id is not None else None,
            task_id=task_id,
            het=bool(job.heterogeneous_id),
            uid=job.user_id,
            account=job.account or "",
            partitions=tuple((job.partition or "").split(",")),
            qos=job.qos or "",
            reservation=job.reservation or "",
            state=job.state,
            reason="" if job.state_reason in (None, "None") else job.state_reason,
            priority=job.priority or 0,
            nice=job.nice or 0,
            submit_s=job.submit_time or 0,
            eligible_s=job.eligible_time or None,
            start_s=job.start_time or None,
            end_s=job.end_time or None,
            limit_s=job.time_limit * 60 if job.time_limit else None,
            num_nodes=job.num_nodes or 1,
            nodes=expand(job.allocated_nodes or ""),
            wanted_nodes=job.required_nodes or "",
            excluded_nodes=expand(job.excluded_nodes or ""),
            features="&".join(job.constraints or ()),
            exclusive=job.resource_sharing in ("no", "NO"),
            dependency="unfulfilled" if job.dependencies else "",
            requeue=bool(job.is_requeueable),
            restarts=job.requeue_count or 0,
            cpus=job.cpus or 1,
            mem_mib=job.memory or 0,
            per_job=_gres(job.tres_per_job),
            per_node=_gres(job.tres_per_node),
            per_socket=_gres(job.tres_per_socket),
            per_task=_gres(job.tres_per_task),
            per_gpu_extras=job.cpus_per_gpu is not None or job.memory_per_gpu is not None,
            admin_comment=admin_comment,
            comment=job.comment or "",
            tag=parse_tag(admin_comment),
        )


class PyslurmSlurm:
    """The queue from libslurm, the rest from the commands."""

    name = "pyslurm"

    def __init__(self, commands: CommandSlurm) -> None:
        self._commands = commands
        self._pyslurm = importlib.import_module("pyslurm")
        self._own_requests = 0

    @property
    def calls(self) -> int:
        return self._own_requests + self._commands.calls

    @property
    def release(self) -> Release:
        return self._commands.release

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        self._own_requests += 1
        try:
            loaded = self._pyslurm.Jobs.load()
        except self._pyslurm.RPCError as error:
            raise ControllerDown(f"pyslurm: {error}", "Check that slurmctld runs: scontrol ping.") from error
        found = [job for record in loaded.values() for job in translate(record)]
        wanted = set(only)
        return [job for job in found if not wanted or job.key in wanted or str(job.raw_id) in wanted]

    def nodes(self) -> list[Node]:
        return self._commands.nodes()

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        return self._commands.accounting(query)

    def config(self) -> Mapping[str, str]:
        return self._commands.config()

    def partitions(self) -> list[Partition]:
        return self._commands.partitions()

    def reservations(self) -> list[Reservation]:
        return self._commands.reservations()

    def limits(self) -> list[Limit]:
        return self._commands.limits()

    def update_job(self, key: str, changes: Mapping[str, str]) -> None:
        self._commands.update_job(key, changes)

    def requeue(self, key: str) -> None:
        self._commands.requeue(key)
