"""A job is read again just before it is changed: a change meant for one job must never reach another.

The two answers have different random delimiters, so that nobody can forge both.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job


def read_again(slurm: Slurm, keys: Iterable[str]) -> dict[str, Job]:
    """The jobs as they are now, by key, in one request; those that are gone are absent."""
    wanted = sorted(keys)
    return {job.key: job for job in slurm.jobs(wanted)} if wanted else {}


def is_same(seen: Job, now: Job | None) -> bool:
    """Whether the job is still the one that the decision was about."""
    return now is not None and _identity(seen) == _identity(now)


def _identity(job: Job) -> tuple[object, ...]:
    # A waiting task of an array gets an id of its own when it is changed, so its array's id and its index must do.
    number = job.raw_id if job.task_id is None else (job.array_id, job.task_id)
    request = (job.per_job, job.per_node, job.per_socket, job.per_task, job.wanted_nodes)
    return number, job.uid, job.submit_s, job.pending, job.running, job.admin_comment, request
