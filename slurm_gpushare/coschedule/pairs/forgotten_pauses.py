"""Pauses that Slurm has forgotten.

A slurmctld that was killed may recover a state from before a pause: it then says that the job runs, while it stands
still on its node for ever. Such a job is paused once more, so that Slurm knows it, and goes on like every other.

A slurmctld that has just started loses messages to nodes that have not registered anew, or sends them late: a job that
it lets go on may then stand still for ever. So it is given time before a pause is made again, and before any ends.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.acting.apply import Outcome
from slurm_gpushare.coschedule.acting.pauses import pause
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store

SETTLE_S = 10.0
"""So long a slurmctld that has started is left alone, and so long a pause that was made again lasts at least."""

LEAST_S = 2.0
"""Slurm tells nodes of a pause and of its end in messages of their own, which must not arrive in the wrong order."""


def _just_started(booted_s: int | None, now_s: float) -> bool:
    return booted_s is not None and 0.0 <= now_s - booted_s < SETTLE_S


class ForgottenPauses:
    """Remembers whom we paused, and finds out who stands still without Slurm's knowing."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._since_s: dict[int, float] = {}
        self._made_again_s: dict[int, float] = {}

    def recall(self, store: Store, jobs: Collection[Job]) -> None:
        """What an earlier helper paused: a controller that fails takes the helper along."""
        for decision in store.decisions.of_jobs({job.raw_id for job in jobs if job.state == "RUNNING"}):
            if decision.kind == "paused":
                self._since_s[decision.job_id] = decision.at_s
            elif decision.kind == "resumed":
                self._since_s.pop(decision.job_id, None)

    def paused(self, job: Job, now_s: float) -> None:
        self._since_s[job.raw_id] = now_s

    def resumed(self, job: Job) -> None:
        self._since_s.pop(job.raw_id, None)

    def pause_again(self, jobs: Collection[Job], now_s: float) -> set[int]:
        """Suspend those that stand still although Slurm says that they run; the next look resumes them."""
        running = {job.raw_id for job in jobs if job.running}
        self._since_s = {raw_id: since_s for raw_id, since_s in self._since_s.items() if raw_id in running}
        self._made_again_s = {raw_id: at_s for raw_id, at_s in self._made_again_s.items() if raw_id in running}
        suspects = [job for job in jobs if job.state == "RUNNING" and self._paused_at(job) is not None]
        booted_s = self._booted_s() if suspects else None
        again = set()
        for job in suspects:
            if booted_s is None or booted_s < int(self._paused_at(job) or 0.0):  # Slurm tells whole seconds
                self.resumed(job)  # somebody else let it go on
                continue
            if _just_started(booted_s, now_s):
                continue
            applied = pause(self._slurm, job, now_s, by_signal=False)
            log.warning("pause", job=job.key, outcome=applied.outcome, message=applied.message or None,
                        why="slurmctld had forgotten that it is paused")  # fmt: skip
            if applied.outcome is Outcome.DONE:
                again.add(job.raw_id)
                self._made_again_s[job.raw_id] = now_s
        return again

    def may_end(self, job: Job, now_s: float) -> bool:
        """Whether the end of the job's pause will surely reach its node, and after its beginning."""
        if job.tag is None or job.tag.paused is None or not job.stands_still:
            return True
        least_s = SETTLE_S if job.raw_id in self._made_again_s else LEAST_S
        if 0.0 <= now_s - job.tag.paused.since_s < least_s:  # a clock that was set back must keep nobody
            return False
        return not _just_started(self._booted_s(), now_s)

    def _booted_s(self) -> int | None:
        return values.integer(self._slurm.config().get("BOOT_TIME", ""))

    def _paused_at(self, job: Job) -> float | None:
        if job.tag is not None and job.tag.paused is not None:
            return float(job.tag.paused.since_s)
        return self._since_s.get(job.raw_id)
