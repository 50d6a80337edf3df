"""Whose job was it, and with which token? Asked when a telemetry record arrives."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_gpushare.protocol.comment import clear_consent
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import AccountingDown

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


class JobTokens:
    """Tags by SLURM_JOB_ID: from the queue, else from accounting, which never forgets."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
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
