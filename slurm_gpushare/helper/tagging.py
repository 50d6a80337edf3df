"""Tags that follow the comments: of jobs that the submit hook missed, and of those whose owners took the token off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from slurm_gpushare.helper.changes import Change
from slurm_gpushare.protocol.tag import Tag, clear_consent, with_tag, without_tag
from slurm_gpushare.slurm.queue import Job


def untagged(jobs: Iterable[Job], partitions: Collection[str], shards_per_gpu: int) -> list[Job]:
    """Jobs without a tag that ask for exactly one GPU on one node: whether they opted in, their comments say."""
    return [
        job
        for job in jobs
        if job.tag is None
        and (job.pending or job.running)
        and not job.het
        and job.num_nodes == 1
        and set(job.partitions) & set(partitions)
        and one_card(job, shards_per_gpu)
    ]


def adoptions(
    jobs: Iterable[Job], comments: Mapping[str, str], cluster_of: Callable[[str, int], int | None]
) -> list[tuple[Job, Change]]:
    """Tags for `untagged` jobs that opted in by their comment, so that their telemetry counts.

    `cluster_of(token, uid)` is the cluster of a known token that belongs to that user. Without the hook nobody kept
    the original request or moved it to where it can be changed, so the request stays untouched.
    """
    found = []
    for job in jobs:
        consent = clear_consent(comments.get(job.key, ""))
        if consent is None:
            continue
        cluster = cluster_of(consent.token, job.uid)
        tag = Tag(
            probe=cluster is None,
            cluster=cluster,
            token=consent.token,
            max_isd_pct=consent.max_isd_pct,
            requeue=consent.requeue or False,
        )
        found.append((job, Change(job.key, {"AdminComment": with_tag(job.admin_comment, tag)})))
    return found


def only_measured(jobs: Iterable[Job]) -> list[Job]:
    """Jobs with a tag whose requests nobody has changed: first runs, and those that the hook missed.

    Of a gang the hook changes the request from the first run on.
    """
    tagged = ((job, job.tag) for job in jobs if (job.pending or job.running) and job.tag is not None)
    return [job for job, tag in tagged if tag.original is None and tag.gang is None]


def withdrawals(jobs: Iterable[Job], comments: Mapping[str, str]) -> list[tuple[Job, Change]]:
    """What takes the tag off `only_measured` jobs whose owners have taken the token off their comments."""
    gone = (job for job in jobs if job.key in comments and clear_consent(comments[job.key]) is None)
    return [(job, Change(job.key, {"AdminComment": without_tag(job.admin_comment)})) for job in gone]


def one_card(job: Job, shards_per_gpu: int) -> bool:
    """One GPU, or what one GPU becomes before 23.11.5: all shards of a card."""
    asked = [gres for gres in job.gres if gres.count]
    return len(asked) == 1 and (asked[0].name, asked[0].count) in {("gpu", 1), ("shard", shards_per_gpu)}
