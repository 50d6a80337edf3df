"""Who is on which GPU: worked out from the queue and the nodes, without asking Slurm for each job.

A job with typed shards names its own GPU: the type is the index, the node is in the queue. Whole GPUs are
read off the nodes' GresUsed. What neither explains (shards asked for by hand, a job that another partition's
view hides) blocks the card: nobody is put beside a stranger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_gpushare.slurm.gres import Usage, parse_gres, type_index
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job


@dataclass(frozen=True, slots=True, order=True)
class Card:
    """A GPU's address."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


def parse_card(text: str | None) -> Card | None:
    """``node:index``, as tags write it."""
    node, colon, index = (text or "").rpartition(":")
    return Card(node, int(index)) if colon and node and index.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Holding:
    """A job's part of a card."""

    job: Job
    shards: int
    whole: bool
    exact: bool = True
    """False: the job has a card of this node, and this is one that it may be (an untyped request)."""


@dataclass(slots=True)
class CardUse:
    """What is on a card: jobs that hold it, jobs that we sent there and that have not started, and strangers."""

    shards_total: int
    holders: list[Holding] = field(default_factory=list)
    coming: list[Holding] = field(default_factory=list)
    stranger: bool = False
    """Somebody is here whom the queue does not name."""

    @property
    def free(self) -> bool:
        return not (self.holders or self.coming or self.stranger)


def placed_card(job: Job) -> Card | None:
    """Where a pending job's request sends it by our doing, if its request still says what its tag says."""
    card = parse_card(job.tag.placed) if job.tag else None
    if card is None or job.shard is None or job.wanted_nodes != card.node:
        return None
    return card if type_index(job.shard.type) == card.index else None


def _holdings(job: Job, node: Node) -> dict[int, Holding]:
    """The GPUs of `node` that the job itself names, by typed shards or typed GPUs."""
    named: dict[int, Holding] = {}
    for gres in job.gres:
        index = type_index(gres.type)
        if index is None or not gres.count:
            continue
        if gres.name == "gpu":
            named[index] = Holding(job, node.shards_per_gpu.get(index, 0), whole=True)
        elif gres.name == "shard":
            named[index] = Holding(job, gres.count, whole=gres.count >= node.shards_per_gpu.get(index, 0))
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


def occupancy(nodes: Iterable[Node], jobs: Iterable[Job]) -> Mapping[Card, CardUse]:
    """Every GPU that is typed by its index, with who is on it."""
    running: dict[str, list[Job]] = defaultdict(list)
    coming: dict[Card, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.running:
            for name in job.nodes:
                running[name].append(job)
        elif job.pending and (card := placed_card(job)) is not None:
            coming[card].append(job)
    found: dict[Card, CardUse] = {}
    for node in nodes:
        uses = {index: CardUse(node.shards_per_gpu.get(index, 0)) for index in node.gpus}
        _seat(node, uses, running[node.name])
        for index, use in uses.items():
            card = Card(node.name, index)
            for job in coming.get(card, ()):
                shards = job.shard.count if job.shard else 0
                use.coming.append(Holding(job, shards, whole=shards >= use.shards_total))
            found[card] = use
    return found


def _seat(node: Node, uses: dict[int, CardUse], jobs: list[Job]) -> None:
    """Put the node's running jobs on its cards; mark what stays unexplained."""
    nameless: list[Job] = []
    parts = False
    shards_per_gpu = max((use.shards_total for use in uses.values()), default=0)
    for job in sorted(jobs, key=lambda job: (job.start_s or 0, job.raw_id)):
        named = _holdings(job, node)
        for index, holding in named.items():
            if index in uses:
                uses[index].holders.append(holding)
        if not named:
            cards, part = _vague(job, shards_per_gpu)
            nameless += [job] * cards
            parts |= part
    in_use = node.usage.whole | node.usage.shards.keys()
    unclaimed = [index for index in sorted(in_use) if index in uses and not uses[index].holders]
    certain = len({job.key for job in nameless}) <= 1 and not parts
    for index, job in zip(unclaimed, nameless, strict=False):
        uses[index].holders.append(Holding(job, uses[index].shards_total, whole=True, exact=certain))
    for index, use in uses.items():
        use.stranger = _unexplained(index, use, node.usage, parts)


def _unexplained(index: int, use: CardUse, usage: Usage, vague_shards: bool) -> bool:
    if index in usage.whole and not use.holders:
        return True
    known = sum(holding.shards for holding in use.holders if not holding.whole)
    reported = usage.shards.get(index, 0)
    if usage.exact:
        return reported > known and not any(holding.whole for holding in use.holders)
    # Up to 23.11.1 the node only says that shards of this GPU are in use, not how many.
    return bool(reported) and (not use.holders or vague_shards)
