"""Jobs that carry a token but no tag: the submit hook was away. They are tagged, and left as they asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from slurm_gpushare.coschedule.changes import Change
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import TOKEN, Tag, with_tag

_COMMENT = re.compile(rf"gpushare:({TOKEN.pattern})(?:,max=(\d{{1,4}}))?", re.ASCII)


def asked_token(comment: str) -> str | None:
    """The token that a user's comment names, if it is exactly that."""
    found = _COMMENT.fullmatch(comment.strip())
    return found[1] if found else None


def adoptions(
    jobs: Iterable[Job],
    partitions: Collection[str],
    shards_per_gpu: int,
    cluster_of: Callable[[str, int], int | None],
) -> list[tuple[Job, Change]]:
    """Tags for untagged jobs that opted in and ask for exactly one GPU on one node, so that their telemetry counts.

    `cluster_of(token, uid)` is the cluster of a known token that belongs to that user. Without the hook nobody kept
    the original request or moved it to where it can be changed, so the request stays untouched.
    """
    found = []
    for job in jobs:
        token = asked_token(job.comment) if job.tag is None and job.comment.startswith("gpushare:") else None
        if token is None or job.het or not set(job.partitions) & set(partitions) or not (job.pending or job.running):
            continue
        if job.num_nodes != 1 or not _one_card(job, shards_per_gpu):
            continue
        cluster = cluster_of(token, job.uid)
        tag = Tag(probe=cluster is None, cluster=cluster, token=token)
        found.append((job, Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})))
    return found


def _one_card(job: Job, shards_per_gpu: int) -> bool:
    """One GPU, or what one GPU becomes before 23.11.5: all shards of a card."""
    asked = [gres for gres in job.gres if gres.count]
    return len(asked) == 1 and (asked[0].name, asked[0].count) in {("gpu", 1), ("shard", shards_per_gpu)}
