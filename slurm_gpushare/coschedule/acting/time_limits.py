"""Time that a neighbour cost, given back to a job's time limit (``ExtendTimeLimit=yes``)."""

from __future__ import annotations

import math
from dataclasses import replace

from slurm_gpushare.coschedule.acting.changes import Change
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import with_tag

SOON_S = 180.0


def stopped_s(job: Job, now_s: float) -> float:
    """How long its clock ran on while we had stopped it by a signal."""
    return job.tag.stopped_s(now_s) if job.tag else 0.0


def ends_soon(job: Job, now_s: float) -> bool:
    """Whether it is so near its time limit that what was not measured yet must be given back as it was expected."""
    return job.running and job.end_s is not None and job.end_s - now_s < SOON_S


def most_lost_s(job: Job, promise_pct: float) -> float:
    """What neighbours may have cost it at most, to be given back: the promised part of the limit it was submitted with.

    Whoever loses more is separated or told. Without an end to it a job could lengthen its limit by doing nothing.
    """
    return math.inf if job.limit_s is None else promise_pct / 100.0 * max(0.0, job.limit_s - job.given_s)


def extension(job: Job, lost_s: float, most_s: float, free_until_s: float) -> Change | None:
    """The change that lengthens a running job's limit by whole minutes lost and not given yet; None if there are none.

    Never past what its partitions allow (`most_s`), nor into a reservation of its node (`free_until_s`, unix time).
    """
    if job.tag is None or job.limit_s is None or job.start_s is None or not job.running:
        return None
    minutes = math.ceil(lost_s / 60.0) - job.tag.given_min
    room_s = min(most_s - job.limit_s, free_until_s - job.start_s - job.limit_s)
    minutes = minutes if room_s == math.inf else min(minutes, int(room_s // 60.0))
    if minutes <= 0:
        return None
    tag = replace(job.tag, given_min=job.tag.given_min + minutes)
    limit_minutes = math.ceil(job.limit_s / 60.0) + minutes
    return Change(job.key, {"TimeLimit": str(limit_minutes), "AdminComment": with_tag(job.admin_comment, tag)})
