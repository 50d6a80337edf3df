"""Whose job was it, and with which token? Asked when a telemetry record arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.errors import AccountingDown
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import Tag

# sacct's command line holds every id: keep it well under the kernel's limit for one argument.
_AT_ONCE = 5_000
_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class JobTag:
    """The owner of a job and our tag on it, if it has one."""

    raw_id: int
    uid: int
    tag: Tag | None


class JobTags:
    """Tags by SLURM_JOB_ID: from the queue, else from accounting, which never forgets."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._known: dict[int, JobTag] = {}

    def take(self, queue: Iterable[Job]) -> None:
        """Use a queue that was read anyway instead of asking again; jobs that were running in it are remembered.

        Most records are of jobs that ended since the last look: accounting need not be asked about them.
        """
        self._known.update((job.raw_id, JobTag(job.raw_id, job.uid, job.tag)) for job in queue if job.running)
        for raw_id in list(self._known)[: max(0, len(self._known) - _REMEMBERED)]:
            del self._known[raw_id]

    def resolve(self, raw_ids: Iterable[int]) -> dict[int, JobTag]:
        """Those of the jobs that Slurm knows; the rest are absent: ask again later, or give them up."""
        wanted = set(raw_ids)
        missing = sorted(wanted - self._known.keys())
        if missing and not self._known:
            self.take(self._slurm.jobs())
            missing = sorted(wanted - self._known.keys())
        found = {raw_id: self._known[raw_id] for raw_id in wanted & self._known.keys()}
        for first in range(0, len(missing), _AT_ONCE):
            chunk = [str(raw_id) for raw_id in missing[first : first + _AT_ONCE]]
            try:
                accounted = self._slurm.accounting(AccountingQuery(jobs=chunk))
            except AccountingDown:
                break
            found.update(
                (job.raw_id, JobTag(job.raw_id, job.uid, job.tag)) for job in accounted if job.raw_id in wanted
            )
        return found
