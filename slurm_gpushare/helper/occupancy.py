"""Who is on which GPU: worked out from the queue and the nodes, without asking Slurm for each job.

A job with typed shards names its own GPU: the type is the index, the node is in the queue. A gang, which has shards of
every card of its node, has the node for an address, written as that of the first card. Whole GPUs are
read off the nodes' GresUsed. What neither explains (shards asked for by hand, a job that another partition's
view hides) blocks the card: nobody is put beside a stranger.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import Usage, parse_gres, type_index


@dataclass(frozen=True, slots=True, order=True)
class GpuAddress:
    """A GPU's address."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


def parse_card(text: str | None) -> GpuAddress | None:
    """``node:index``, as tags write it."""
    node, colon, index = (text or "").rpartition(":")
    return GpuAddress(node, int(index)) if colon and node and index.isdecimal() else None


def place_of(job: Job, card: GpuAddress) -> str:
    """Where a job is that is on `card`: ``n7:2``, of a gang ``n7:0-3``."""
    return f"{card.node}:0-{job.gang - 1}" if job.gang else str(card)


@dataclass(frozen=True, slots=True)
class CardShare:
    """A job's part of a card."""

    job: Job
    shards: int
    whole: bool


@dataclass(slots=True)
class CardUse:
    """What is on a card: jobs that hold it, jobs that we sent there and that have not started, and strangers."""

    shards_total: int
    occupants: list[CardShare] = field(default_factory=list)
    coming: list[CardShare] = field(default_factory=list)
    stranger: bool = False
    """Somebody is here whom the queue does not name."""


def placed_card(job: Job) -> GpuAddress | None:
    """Where a pending job's request sends it by our doing, if its request still says what its tag says."""
    card = parse_card(job.tag.placed) if job.tag else None
    if card is None or job.wanted_nodes != card.node:
        return None
    if job.gang:
        return card
    if job.shard is None:
        return None
    return card if type_index(job.shard.type) == card.index else None


def placed_cards(job: Job) -> list[GpuAddress]:
    """The card that a pending job was sent to, or all cards of a gang's node."""
    card = placed_card(job)
    if card is None:
        return []
    return [GpuAddress(card.node, index) for index in range(job.gang)] if job.gang else [card]


def _card_shares(job: Job, node: Node) -> dict[int, CardShare]:
    """The GPUs of `node` that the job itself names, by typed shards or typed GPUs; all of them for a gang."""
    named: dict[int, CardShare] = {}
    shards = job.shards_a_card
    if shards and job.gang == len(node.gpus):
        totals = ((index, node.shards_per_gpu.get(index, 0)) for index in node.gpus)
        return {index: CardShare(job, shards, whole=shards >= total) for index, total in totals}
    for gres in job.gres:
        index = type_index(gres.type)
        if index is None or not gres.count:
            continue
        if gres.name == "gpu":
            named[index] = CardShare(job, node.shards_per_gpu.get(index, 0), whole=True)
        elif gres.name == "shard":
            named[index] = CardShare(job, gres.count, whole=gres.count >= node.shards_per_gpu.get(index, 0))
    return named


def _vague(job: Job, shards_per_gpu: int) -> tuple[int, bool]:
    """Whole cards that the job has on each of its nodes without naming them, and whether it has a part of one.

    All shards of a card, untyped, are a whole card: what a request for one GPU becomes before 23.11.5.
    """
    cards = 0
    part = False
    for gres in job.gres:
        if type_index(gres.type) is not None:
            continue
        if gres.name == "gpu":
            cards += gres.count // max(1, job.num_nodes) if parse_gres(job.per_job) else gres.count
        elif gres.name == "shard" and gres.count:
            whole = shards_per_gpu and gres.count % shards_per_gpu == 0
            cards += gres.count // shards_per_gpu if whole else 0
            part |= not whole
    return cards, part


def occupancy(nodes: Iterable[Node], jobs: Iterable[Job]) -> Mapping[GpuAddress, CardUse]:
    """Every GPU that is typed by its index, with who is on it."""
    running: dict[str, list[Job]] = defaultdict(list)
    coming: dict[GpuAddress, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.running:
            for name in job.nodes:
                running[name].append(job)
        elif job.pending:
            for card in placed_cards(job):
                coming[card].append(job)
    found: dict[GpuAddress, CardUse] = {}
    for node in nodes:
        uses = {index: CardUse(node.shards_per_gpu.get(index, 0)) for index in node.gpus}
        _seat(node, uses, running[node.name])
        for index, use in uses.items():
            card = GpuAddress(node.name, index)
            for job in coming.get(card, ()):
                shards = job.shards_a_card or (job.shard.count if job.shard else 0)
                use.coming.append(CardShare(job, shards, whole=shards >= use.shards_total))
            found[card] = use
    return found


def _seat(node: Node, uses: dict[int, CardUse], jobs: list[Job]) -> None:
    """Put the node's running jobs on its cards; mark what stays unexplained."""
    nameless: list[Job] = []
    parts = False
    shards_per_gpu = max((use.shards_total for use in uses.values()), default=0)
    for job in sorted(jobs, key=lambda job: (job.start_s or 0, job.raw_id)):
        named = _card_shares(job, node)
        for index, share in named.items():
            if index in uses:
                uses[index].occupants.append(share)
        if not named:
            cards, part = _vague(job, shards_per_gpu)
            nameless += [job] * cards
            parts |= part
    in_use = node.usage.whole | node.usage.shards.keys()
    unclaimed = [index for index in sorted(in_use) if index in uses and not uses[index].occupants]
    for index, job in zip(unclaimed, nameless, strict=False):
        uses[index].occupants.append(CardShare(job, uses[index].shards_total, whole=True))
    for index, use in uses.items():
        use.stranger = _unexplained(index, use, node.usage, parts)


def _unexplained(index: int, use: CardUse, usage: Usage, vague_shards: bool) -> bool:
    if index in usage.whole and not use.occupants:
        return True
    known = sum(share.shards for share in use.occupants if not share.whole)
    reported = usage.shards.get(index, 0)
    if usage.exact:
        return reported > known and not any(share.whole for share in use.occupants)
    # Up to 23.11.1 the node only says that shards of this GPU are in use, not how many.
    return bool(reported) and (not use.occupants or vague_shards)


# Which jobs take part in sharing, and which of them could start now.


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
