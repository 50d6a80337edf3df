"""Pause a running job and let it go on. Its tag says that the pause is ours before anything stands still.

Slurm gives a suspended job's CPUs to others and takes them back unchecked when it goes on. So a job is suspended only
where nobody waits for them, and waits a little for its own cores when it is to go on; elsewhere it is stopped by a
signal, which leaves it its CPUs, and the time is added to its limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from slurm_gpushare.helper import log
from slurm_gpushare.helper.apply import Applied, Outcome, apply
from slurm_gpushare.helper.changes import Change
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.tag import Paused, Tag, with_tag
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown, JobMovedOn, SlurmMissing

if TYPE_CHECKING:
    from slurm_gpushare.store import Store

LONGEST_PAUSE_S = 300.0
"""Watchdogs of frameworks count wall time, and give up after ten minutes or more without progress."""
CPUS_TAKEN = "its CPUs were given to another job: it goes on when they are free, and after a minute in any case"
CPUS_SHARED = "its CPUs were given to another job: the two share them now"


def loses_its_cpus(job: Job, node: Node, others: Iterable[Job], startable: Iterable[Job]) -> bool:
    """Whether others could take a suspended job's CPUs: somebody waits for this node, or CPU jobs run there."""
    partitions = set(node.partitions)
    beside = any(other.raw_id != job.raw_id and node.name in other.nodes and not other.gres for other in others)
    return beside or any(partitions & set(waiting.partitions) for waiting in startable)


def _tagged(job: Job, tag: Tag) -> Change:
    return Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})


def pause(slurm: Slurm, job: Job, now_s: float, *, by_signal: bool) -> Applied:
    """Suspend a running job, or stop it by a signal."""
    if job.tag is None or job.stands_still:
        return Applied(job.key, Outcome.MOVED_ON, "it stands still already")
    applied = apply(slurm, _tagged(job, replace(job.tag, paused=Paused(int(now_s), by_signal))))
    if applied.outcome is not Outcome.DONE:
        return applied
    try:
        if by_signal:
            slurm.signal(job.key, "STOP")
        else:
            slurm.suspend(job.key)
    except (ControllerDown, SlurmMissing):
        raise  # whether it stands still is not known: the next look, or the watchdog, sees to it
    except SlurmError as error:
        apply(slurm, _tagged(job, job.tag))
        outcome = Outcome.MOVED_ON if isinstance(error, JobMovedOn) else Outcome.REFUSED
        return Applied(job.key, outcome, error.what)
    return applied


def resume(slurm: Slurm, job: Job, now_s: float, *, patient: bool = True, stood_still: bool = True) -> Applied:
    """Let a job that we paused go on. One that goes on already, or waits again, only loses the mark.

    While somebody else has its cores, it waits for them if `patient`, and never past the longest pause: whoever brings
    a long CPU job could keep it paused otherwise. A job that did not stand still gets nothing for a stop by a signal.
    """
    tag = job.tag
    if tag is None or tag.paused is None:
        return Applied(job.key, Outcome.MOVED_ON, "it is not paused by us")
    shares_cores = False
    try:
        if job.stands_still and tag.paused.by_signal:
            slurm.signal(job.key, "CONT")
        elif job.stands_still:
            shares_cores = _cores_taken(slurm, job, tag.paused.since_s)
            if shares_cores and patient and now_s - tag.paused.since_s < LONGEST_PAUSE_S:
                return Applied(job.key, Outcome.WAITS, CPUS_TAKEN)
            slurm.resume(job.key)
    except (ControllerDown, SlurmMissing):
        raise
    except JobMovedOn as news:
        return Applied(job.key, Outcome.MOVED_ON, news.what)
    except SlurmError as error:
        return Applied(job.key, Outcome.REFUSED, error.what)
    counts = job.running and (stood_still or not tag.paused.by_signal)  # Slurm's own clock does stand still
    lasted_s = max(0, int(now_s) - tag.paused.since_s) if counts else 0
    undone = replace(
        tag,
        paused=None,
        paused_before_s=tag.paused_before_s + lasted_s,
        stopped_before_s=tag.stopped_before_s + (lasted_s if tag.paused.by_signal else 0),
    )
    applied = apply(slurm, _tagged(job, undone))
    return replace(applied, message=applied.message or CPUS_SHARED) if shares_cores else applied


def _cores_taken(slurm: Slurm, job: Job, since_s: int) -> bool:
    """Whether a job that started during the pause has one of its cores."""
    here = set(job.nodes)
    newer = [
        other.key
        for other in slurm.jobs()
        if other.running
        and not other.stands_still
        and other.raw_id != job.raw_id
        and here & set(other.nodes)
        and (other.start_s or 0) >= since_s - 1
    ]
    if not newer:
        return False
    cores = slurm.cores_of([job.key, *newer])
    own = cores.get(job.key, frozenset())
    return any(own & cores.get(key, frozenset()) for key in newer)


def resume_all(slurm: Slurm, jobs: Iterable[Job], now_s: float, dry_run: bool = False) -> list[Applied]:
    """Let every job go on that we paused, whoever asks: nothing stays suspended by us."""
    ours = [job for job in jobs if job.tag is not None and job.tag.paused is not None]
    return [Applied(job.key, Outcome.DRY) if dry_run else resume(slurm, job, now_s) for job in ours]


# Pauses that Slurm has forgotten.
#
# A slurmctld that was killed may recover a state from before a pause: it then says that the job runs, while it stands
# still on its node for ever. Such a job is paused once more, so that Slurm knows it, and goes on like every other.
#
# A slurmctld that has just started loses messages to nodes that have not registered anew, or sends them late: a job
# that
# it lets go on may then stand still for ever. So it is given time before a pause is made again, and before any ends.


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
