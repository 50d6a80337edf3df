"""The changes that we make to pending jobs, as pure functions: what to write, never how.

Every change is one update and carries its own undoing: the tag in AdminComment keeps the original request,
the user's own node list and whether our lease still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_gpushare.coschedule.occupancy import Card, parse_card
from slurm_gpushare.slurm.gres import Gres, parse_gres, type_index
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.release import Release
from slurm_gpushare.slurm.request import retarget
from slurm_gpushare.slurm.tag import Tag, with_tag

GUEST_NICE = -1_000_000
"""Ahead of what waits for whole cards. The user's own value is in the tag, and comes back with the request."""


@dataclass(frozen=True, slots=True)
class Change:
    """One ``scontrol update`` of one job."""

    key: str
    fields: Mapping[str, str]


def _end_lease(tag: Tag, job: Job, now_s: float) -> dict[str, str]:
    """``StartTime=now`` while our lease runs, and at no other time: it resets the age that priority counts."""
    if tag.lease and (job.eligible_s is None or job.eligible_s > now_s):
        return {"StartTime": "now"}
    return {}


def place(
    job: Job,
    card: Card,
    gres_type: str,
    shards: int,
    release: Release,
    now_s: float,
    guest: bool = False,
    heir: bool = False,
) -> Change | None:
    """Send a pending job to one card; None if this Slurm cannot change its request so.

    A `guest` is considered before the jobs that wait for whole cards: Slurm's main scheduler stops at the first
    that cannot start, and its backfill holds half a card free for one that needs all of it. The plan has seen to
    it that no job of higher priority waits longer for that. An `heir` comes the same way, to have the card after
    who is there.
    """
    tag = job.tag
    if tag is None or tag.original is None:
        return None
    gres = retarget(job.per_node, str(Gres("shard", gres_type, shards)), release)
    if gres is None:
        return None
    own_nodes = tag.nodes if tag.placed else job.wanted_nodes or tag.nodes
    ahead = (guest or heir) and tag.nice is None
    nice = job.nice if ahead else tag.nice
    new_tag = replace(tag, placed=str(card), nodes=own_nodes or None, lease=False, nice=nice, heir=heir)
    return Change(
        job.key,
        {
            "Gres": gres,
            "ReqNodeList": card.node,
            "AdminComment": with_tag(job.admin_comment, new_tag),
            **({"Nice": str(GUEST_NICE)} if ahead else {}),
            **_end_lease(tag, job, now_s),
        },
    )


def touched(job: Job) -> bool:
    """Whether something of ours is in a pending job: a placement, or a lease that was not ended."""
    return job.pending and job.tag is not None and bool(job.tag.placed or job.tag.lease)


def restore(job: Job, release: Release, now_s: float) -> Change | None:
    """Give a pending job its original request back and end our lease, from its tag alone. None: nothing to undo."""
    tag = job.tag
    if tag is None or not touched(job):
        return None
    fields: dict[str, str] = {}
    card = parse_card(tag.placed)
    if tag.original is not None and card is not None:
        # What is no longer as we wrote it was changed by somebody else since, and is theirs.
        if job.shard is not None and type_index(job.shard.type) == card.index:
            gres = retarget(job.per_node, tag.original, release)
            if gres is not None and (job.shard,) != parse_gres(tag.original):
                fields["Gres"] = gres
        if job.wanted_nodes == card.node != tag.nodes:
            fields["ReqNodeList"] = tag.nodes or ""
    if tag.nice is not None:
        fields["Nice"] = str(tag.nice)
    undone = replace(tag, placed=None, nodes=None, lease=False, nice=None, heir=False)
    fields["AdminComment"] = with_tag(job.admin_comment, undone)
    return Change(job.key, fields | _end_lease(tag, job, now_s))
