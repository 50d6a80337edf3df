"""Pause a running job and let it go on. Its tag says that the pause is ours before anything stands still.

Slurm gives a suspended job's CPUs to others and takes them back unchecked when it goes on. So a job is suspended only
where nobody waits for them, and waits a little for its own cores when it is to go on; elsewhere it is stopped by a
signal, which leaves it its CPUs, and the time is added to its limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slurm_gpushare.coschedule.acting.apply import Applied, Outcome, apply
from slurm_gpushare.coschedule.acting.changes import Change
from slurm_gpushare.slurm.errors import ControllerDown, JobMovedOn, SlurmError, SlurmMissing
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import Paused, Tag, with_tag

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
