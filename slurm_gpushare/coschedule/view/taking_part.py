"""Which jobs take part in sharing, and which of them could start now."""

from __future__ import annotations

import math
import re

from slurm_gpushare.slurm.gres import parse_gres
from slurm_gpushare.slurm.queue import Job

# A pending job with another reason (a limit, a licence, a dependency) would not start wherever we put it.
STARTABLE = frozenset({"", "Priority", "Resources", "BeginTime", "Cleaning", "NodeDown"})
# Of a job that names its node while another one that does so, and ranks higher, waits for an epilog there to end. Both
# start as soon as it has.
NODE_OF_ANOTHER = "may be reserved for other job"
_PLAIN_FEATURES = re.compile(r"[\w.-]+(?:[&,][\w.-]+)*")


def token_of(job: Job) -> str | None:
    """The token of a job that takes part in sharing; a probed job does not yet, one that opted out no longer."""
    return job.tag.token if job.tag and not job.tag.probe and not job.opted_out else None


def placeable(job: Job, now_s: float) -> bool:
    """Whether we may place this pending job now: it opted in, can start, and asks what a shard can give."""
    one_card = len([gres for gres in parse_gres(job.per_node) if gres.count]) == 1
    one_card = one_card and len([gres for gres in job.gres if gres.count]) == 1
    return (
        token_of(job) is not None
        and job.tag is not None
        and job.tag.original is not None
        and job.num_nodes == 1
        and not (job.het or job.exclusive or job.per_gpu_extras)
        and (one_card or job.gang is not None)
        and (not job.features or _PLAIN_FEATURES.fullmatch(job.features) is not None)
        and startable(job, now_s)
    )


def startable(job: Job, now_s: float) -> bool:
    """Whether only room, or our lease, keeps a pending job from starting."""
    return (
        job.pending
        and not job.held
        and not job.dependency
        and may_start(job.reason)
        and (not job.begins_later(now_s) or job.leased(now_s))
    )


def may_start(reason: str) -> bool:
    """Whether a job that waits for this reason would start on a card that is free for it."""
    return reason in STARTABLE or NODE_OF_ANOTHER in reason.lower()


def leaving(job: Job, now_s: float, bound_s: float) -> bool:
    """Whether it has ended and only its epilog is in the way: a job sent to its card now is there before any other.

    One whose epilog hangs for longer than a placement would last still holds its card.
    """
    ended_s = math.inf if job.end_s is None else now_s - job.end_s
    return job.state == "COMPLETING" and job.num_nodes == 1 and ended_s < bound_s
