"""The changes that we make to jobs: what to write, as pure functions, and one way to write it.

Every change is one update and carries its own undoing: the tag in AdminComment keeps the original request,
the user's own node list and whether our lease still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from slurm_gpushare.helper.occupancy import GpuAddress, parse_card
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.tag import Tag, clear_consent, with_tag, without_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown, JobMovedOn, SlurmMissing
from slurm_gpushare.slurm.values import Gres, parse_gres, retarget, type_index

GUEST_NICE = -1_000_000
"""Ahead of what waits for whole cards. The user's own value is in the tag, and comes back with the request."""


@dataclass(frozen=True, slots=True)
class Change:
    """One ``scontrol update`` of one job."""

    key: str
    fields: Mapping[str, str]


def _only_while_pending(job: Job) -> dict[str, str]:
    """Makes Slurm refuse the whole change if the job has started meanwhile, before it does any of it.

    Otherwise a node list that reaches a job which has just started there counts as a resize: accounting gets a second
    row for the job, RESIZING. Slurm looks at the account first, and the job's own account changes nothing (read in
    Slurm's source and tried on 22.05, 24.11 and 26.05). A site without accounting has no account, and no such rows.
    """
    return {"Account": job.account} if job.account else {}


def _end_lease(job: Job, now_s: float) -> dict[str, str]:
    """``StartTime=now`` while our lease runs, and at no other time: it resets the age that priority counts."""
    return {"StartTime": "now"} if job.leased(now_s) else {}


def place(
    job: Job,
    card: GpuAddress,
    gres_type: str,
    shards: int,
    release: Release,
    now_s: float,
    guest: bool = False,
    successor: bool = False,
) -> Change | None:
    """Send a pending job to one card, or a gang to all cards of that one's node; None if this Slurm cannot.

    A `guest` is considered before the jobs that wait for whole cards: Slurm's main scheduler stops at the first
    that cannot start, and its backfill holds half a card free for one that needs all of it. The plan has seen to
    it that no job of higher priority waits longer for that. A `successor` comes the same way, to have the card after
    who is there.
    """
    tag = job.tag
    if tag is None or tag.original is None:
        return None
    request = _request(job, gres_type, shards, release)
    if not request:
        return None
    own_nodes = tag.nodes if tag.placed else job.wanted_nodes or tag.nodes
    ahead = (guest or successor) and tag.nice is None
    nice = job.nice if ahead else tag.nice
    new_tag = replace(tag, placed=str(card), nodes=own_nodes or None, lease=False, nice=nice, successor=successor)
    return Change(
        job.key,
        {
            **_only_while_pending(job),
            **request,
            "ReqNodeList": card.node,
            "AdminComment": with_tag(job.admin_comment, new_tag),
            **({"Nice": str(GUEST_NICE)} if ahead else {}),
            **_end_lease(job, now_s),
        },
    )


def _request(job: Job, gres_type: str, shards: int, release: Release) -> dict[str, str]:
    """What asks for `shards` of a card of this type, or of every card for a gang; empty if this Slurm cannot."""
    if job.gang:
        return {"TresPerTask": f"gres/shard:{shards}"} if release.can("keeps_whole_gpus_apart") else {}
    gres = retarget(job.per_node, str(Gres("shard", gres_type, shards)), release)
    return {} if gres is None else {"Gres": gres}


def _original_request(job: Job, card: GpuAddress, original: str, release: Release) -> dict[str, str]:
    """What gives a placed job its original request back; what somebody else has changed since is theirs."""
    if job.gang:
        changed = parse_gres(job.per_task) != parse_gres(original)
        return {"TresPerTask": f"gres/{original}"} if changed else {}
    if job.shard is None or type_index(job.shard.type) != card.index:
        return {}
    gres = retarget(job.per_node, original, release)
    return {} if gres is None or (job.shard,) == parse_gres(original) else {"Gres": gres}


def _own_nodes(job: Job, tag: Tag) -> dict[str, str]:
    """The user's own node list in place of ours."""
    card = parse_card(tag.placed)
    return {"ReqNodeList": tag.nodes or ""} if card and job.wanted_nodes == card.node != tag.nodes else {}


def touched(job: Job) -> bool:
    """Whether something of ours is in a pending job: a placement, or a lease that was not ended."""
    return job.pending and job.tag is not None and bool(job.tag.placed or job.tag.lease)


def restore(job: Job, release: Release, now_s: float) -> Change | None:
    """Give a pending job its original request back and end our lease, from its tag alone. None: nothing to undo.

    One that was requeued starts anew: its pauses were an earlier run's. Slurm leaves it the longer time limit, so the
    tag goes on saying what of it is ours.
    """
    tag = job.tag
    if tag is None or not touched(job):
        return None
    fields = _only_while_pending(job)
    card = parse_card(tag.placed)
    if tag.original is not None and card is not None:
        fields |= _original_request(job, card, tag.original, release) | _own_nodes(job, tag)
    if tag.nice is not None:
        fields["Nice"] = str(tag.nice)
    undone = replace(
        tag, placed=None, nodes=None, lease=False, nice=None, successor=False, paused=None, paused_before_s=0,
        stopped_before_s=0, given_min=int(job.given_s // 60.0),
    )  # fmt: skip
    fields["AdminComment"] = with_tag(job.admin_comment, undone)
    return Change(job.key, fields | _end_lease(job, now_s))


def leave(job: Job, now_s: float) -> Change | None:
    """Take off what is left of ours in a job whose owner opted out, the tag too. None: it did not opt out."""
    tag = job.tag
    if tag is None or not job.opted_out:
        return None
    fields = {"AdminComment": without_tag(job.admin_comment)}
    if not job.pending:
        return Change(job.key, fields)
    fields |= _own_nodes(job, tag)
    if tag.nice is not None and (job.nice == GUEST_NICE or tag.nice < 0):
        fields["Nice"] = str(tag.nice)
    return Change(job.key, _only_while_pending(job) | fields | _end_lease(job, now_s))


# A job is read again just before it is changed: a change meant for one job must never reach another.
#
# The two answers have different random delimiters, so that nobody can forge both.


def read_again(slurm: Slurm, keys: Iterable[str]) -> dict[str, Job]:
    """The jobs as they are now, by key, in one request; those that are gone are absent."""
    wanted = sorted(keys)
    return {job.key: job for job in slurm.jobs(wanted)} if wanted else {}


def is_same(seen: Job, now: Job | None) -> bool:
    """Whether the job is still the one that the decision was about."""
    return now is not None and _identity(seen) == _identity(now)


def _identity(job: Job) -> tuple[object, ...]:
    # A waiting task of an array gets an id of its own when it is changed, so its array's id and its index must do.
    number = job.raw_id if job.task_id is None else (job.array_id, job.task_id)
    request = (job.per_job, job.per_node, job.per_socket, job.per_task, job.wanted_nodes)
    return number, job.uid, job.submit_s, job.pending, job.running, job.admin_comment, request


# Time that a neighbour cost, given back to a job's time limit (``ExtendTimeLimit=yes``).


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


# Tags that follow the comments: of jobs that the submit hook missed, and of those whose owners took the token off.


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
    """Jobs with a tag that the hook lets their owners change: first runs, and those that it missed.

    Of a gang the hook changes the request from the first run on.
    """
    tagged = ((job, job.tag) for job in jobs if (job.pending or job.running) and job.tag is not None)
    return [job for job, tag in tagged if (tag.probe or tag.original is None) and tag.gang is None]


def convertible(jobs: Iterable[Job]) -> list[Job]:
    """First runs that wait in the form in which the hook wrote them so that they can share once they are known."""
    waiting = ((job, job.tag) for job in jobs if job.pending and job.tag is not None and job.tag.probe)
    return [job for job, tag in waiting if tag.original and parse_gres(job.per_node) == parse_gres(tag.original)]


def conversions(
    jobs: Iterable[Job], comments: Mapping[str, str], cluster_of: Callable[[str, int], int | None]
) -> list[tuple[Job, Change]]:
    """What makes sharers of `convertible` jobs whose workload was measured while they waited.

    Their requests, and so their places in the queue, stay. Their owners may have changed their minds: the comments say.
    """
    found = []
    for job in jobs:
        tag, consent = job.tag, clear_consent(comments.get(job.key, ""))
        cluster = cluster_of(consent.token, job.uid) if consent else None
        if tag is not None and consent is not None and consent.token == tag.token and cluster is not None:
            comment = with_tag(job.admin_comment, replace(tag, probe=False, cluster=cluster))
            found.append((job, Change(job.key, {**_only_while_pending(job), "AdminComment": comment})))
    return found


def withdrawals(jobs: Iterable[Job], comments: Mapping[str, str]) -> list[tuple[Job, Change]]:
    """What takes the tag off `only_measured` jobs whose owners have taken the token off their comments."""
    gone = (job for job in jobs if job.key in comments and clear_consent(comments[job.key]) is None)
    return [(job, Change(job.key, {"AdminComment": without_tag(job.admin_comment)})) for job in gone]


def one_card(job: Job, shards_per_gpu: int) -> bool:
    """One GPU, or what one GPU becomes before 23.11.5: all shards of a card."""
    asked = [gres for gres in job.gres if gres.count]
    return len(asked) == 1 and (asked[0].name, asked[0].count) in {("gpu", 1), ("shard", shards_per_gpu)}


# Making a change. A job that moved on meanwhile is news; only Slurm's own trouble is an error.


class Outcome(StrEnum):
    """What became of a change."""

    DONE = "done"
    DRY = "dry-run"
    MOVED_ON = "moved-on"  # it started, ended or was changed first
    REFUSED = "refused"


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


def apply_to(slurm: Slurm, job: Job, change: Change, fresh: Job | None) -> Applied:
    """Change a job if it is still what the decision was about; `fresh` is the job as it was just read again."""
    now = fresh or read_again(slurm, [job.key]).get(job.key)
    return apply(slurm, change) if is_same(job, now) else Applied(job.key, Outcome.MOVED_ON, CHANGED)
