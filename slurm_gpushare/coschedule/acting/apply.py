"""Write changes into Slurm. A job that moved on meanwhile is news; only Slurm's own trouble is an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from slurm_gpushare.coschedule.acting.changes import Change, restore
from slurm_gpushare.coschedule.acting.reread import is_same, read_again
from slurm_gpushare.slurm.errors import ControllerDown, JobMovedOn, SlurmError, SlurmMissing
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job


class Outcome(StrEnum):
    """What became of a change."""

    DONE = "done"
    DRY = "dry-run"
    MOVED_ON = "moved-on"  # it started, ended or was changed first
    REFUSED = "refused"
    WAITS = "waits"  # not now: it is tried again


CHANGED = "it changed while this was decided"


@dataclass(frozen=True, slots=True)
class Applied:
    """A change and what became of it."""

    key: str
    outcome: Outcome
    message: str = ""


def apply(slurm: Slurm, change: Change, dry_run: bool = False) -> Applied:
    """Make one change. Raises only if Slurm as a whole does not answer: the tick is then over."""
    if dry_run:
        return Applied(change.key, Outcome.DRY)
    try:
        slurm.update_job(change.key, change.fields)
    except JobMovedOn as news:
        return Applied(change.key, Outcome.MOVED_ON, news.what)
    except (ControllerDown, SlurmMissing):
        raise
    except SlurmError as error:
        return Applied(change.key, Outcome.REFUSED, error.what)
    return Applied(change.key, Outcome.DONE)


def release_jobs(
    slurm: Slurm, jobs: Iterable[Job], now_s: float, dry_run: bool = False
) -> list[tuple[Change, Applied]]:
    """Give every pending job that carries something of ours its original request back."""
    found = ((job, restore(job, slurm.release, now_s)) for job in jobs)
    changes = [(job, change) for job, change in found if change is not None]
    again = {} if dry_run else read_again(slurm, [job.key for job, _ in changes])
    done = []
    for job, change in changes:
        if dry_run or is_same(job, again.get(job.key)):
            done.append((change, apply(slurm, change, dry_run)))
        else:
            done.append((change, Applied(change.key, Outcome.MOVED_ON, CHANGED)))
    return done
