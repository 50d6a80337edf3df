"""The optional backend: the queue through libslurm, for the one Slurm release on which the contract test has passed.

It only reads, and only the queue: pyslurm's nodes do not say which GPU is in use, and its changes fail without a word.
What it cannot say of a job, and any record that it cannot give, is asked of squeue.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import CommandSlurm
from slurm_gpushare.slurm.errors import ControllerDown, SlurmError
from slurm_gpushare.slurm.pyslurm_jobs import listed, translate, unsure
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.release import Release, parse_release
from slurm_gpushare.slurm.scontrol_session import ScontrolSession

TRIED = (25, 11)
"""The release (year, month) of pyslurm and of Slurm on which both backends were seen to say the same."""
_BAD_RECORD = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_LOG = logging.getLogger("gpushare")


def why_not(release: Release) -> str | None:
    """Why pyslurm cannot serve this Slurm, or None if it can.

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
    return None


class PyslurmSlurm(CommandSlurm):
    """The queue from libslurm; every other question and every change through the commands."""

    name = "pyslurm"

    def __init__(
        self, run: Callable[..., str] = runner.run, library: Any = None, session: ScontrolSession | None = None
    ) -> None:
        super().__init__(run, session)
        os.environ["SLURM_BITSTR_LEN"] = "0"  # else libslurm cuts the waiting tasks of an array at 64 characters
        self._pyslurm = importlib.import_module("pyslurm") if library is None else library
        self._requests: dict[tuple[int, str], Job] = {}

    def jobs(self, only: Iterable[str] = ()) -> list[Job]:
        if wanted := list(only):
            return super().jobs(wanted)  # squeue also finds jobs that ended
        self._calls += 1
        try:
            records = list(self._pyslurm.Jobs.load().values())
        except self._pyslurm.RPCError as error:
            raise ControllerDown(f"pyslurm: {error}", "Check that slurmctld runs: scontrol ping.") from error
        except _BAD_RECORD as error:
            _LOG.warning('event=pyslurm error=%s message="squeue is asked instead"', type(error).__name__)
            return super().jobs()
        return self._joined(records)

    def _joined(self, records: Iterable[Any]) -> list[Job]:
        """The records' jobs; those that pyslurm cannot tell come from squeue, in one question."""
        found: list[Job] = []
        partly: dict[tuple[int, str], list[Job]] = {}
        unreadable: list[str] = []
        for record in records:
            try:
                if not listed(record):
                    continue
                jobs = list(translate(record))
                if unsure(record):
                    partly[record.id, jobs[0].per_node] = jobs
                else:
                    found += jobs
            except _BAD_RECORD as error:
                _LOG.warning("event=pyslurm job=%s error=%s", record.id, type(error).__name__)
                unreadable.append(str(record.id))
        self._requests = {key: job for key, job in self._requests.items() if key in partly}
        ask = [str(raw_id) for raw_id, per_node in partly if (raw_id, per_node) not in self._requests]
        answered = super().jobs([*ask, *unreadable]) if ask or unreadable else []
        found += [job for job in answered if str(job.raw_id) in unreadable]
        by_id = {job.raw_id: job for job in answered}
        for key, jobs in partly.items():
            request = self._requests.get(key) or by_id.get(key[0])
            if request is None:
                continue  # it ended between the two questions
            self._requests[key] = request
            found += [_as_requested(job, request) for job in jobs]
        return found


def _as_requested(job: Job, request: Job) -> Job:
    """The job with the request as squeue says it."""
    return replace(
        job,
        per_job=request.per_job,
        per_node=request.per_node,
        per_socket=request.per_socket,
        per_task=request.per_task,
        per_gpu_extras=request.per_gpu_extras,
    )
