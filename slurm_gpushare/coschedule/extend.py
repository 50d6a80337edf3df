"""Time that a neighbour cost, given back to a job's time limit (``ExtendTimeLimit=yes``)."""

from __future__ import annotations

import math
from dataclasses import replace

from slurm_gpushare.coschedule.changes import Change
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import with_tag

GIVEN = "x"
"""The tag's field for minutes given so far: a new helper goes on where the old one stopped."""


def extension(job: Job, lost_s: float, most_s: float, free_until_s: float) -> Change | None:
    """The change that lengthens a running job's limit by whole minutes lost and not given yet; None if there are none.

    Never past what its partitions allow (`most_s`), nor into a reservation of its node (`free_until_s`, unix time).
    """
    if job.tag is None or job.limit_s is None or job.start_s is None or not job.running:
        return None
    given = int(job.tag.extra.get(GIVEN, "0"))
    minutes = math.ceil(lost_s / 60.0) - given
    room_s = min(most_s - job.limit_s, free_until_s - job.start_s - job.limit_s)
    minutes = minutes if room_s == math.inf else min(minutes, int(room_s // 60.0))
    if minutes <= 0:
        return None
    tag = replace(job.tag, extra={**job.tag.extra, GIVEN: str(given + minutes)})
    limit_minutes = math.ceil(job.limit_s / 60.0) + minutes
    return Change(job.key, {"TimeLimit": str(limit_minutes), "AdminComment": with_tag(job.admin_comment, tag)})
