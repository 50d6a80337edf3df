"""Preemption: which running jobs Slurm holds for preemptible by which waiting one, and what is done for it.

Slurm counts a card that two jobs share as taken until both are gone, and up to 24.11 it vacates one of them a round, or
none. So nobody is put on a card that is being vacated, and where Slurm itself has not freed enough within `PATIENCE_S`
we do what it would: requeue or cancel, by its rules, after its times, guests first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slurm_gpushare.helper import snapshot as snap
from slurm_gpushare.helper.occupancy import CardUse, GpuAddress
from slurm_gpushare.helper.places import Sites
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.accounting import Qos
from slurm_gpushare.slurm.nodes import Partition
from slurm_gpushare.slurm.queue import Job

PATIENCE_S = 1.5
"""Slurm vacates what it can in its next pass: 0.7 s on 26.05 (docs/admin-guide.md). Then it is helped."""
STARTS_WITHIN_S = 30.0
"""Who has not started so long after cards were freed is kept by something else: nobody is lost for it any more."""
HELPS = frozenset({"REQUEUE", "CANCEL"})


class PreemptionTerms(NamedTuple):
    """How a job is preempted."""

    mode: str
    grace_s: float
    """From the first signal to the end."""
    exempt_s: float
    """How long it runs before it can be preempted."""


@dataclass(frozen=True, slots=True)
class PreemptionRules:
    """The site's rules, as slurm.conf, its partitions and its QOS have them. The default: nobody is preempted."""

    by: str = ""
    """``qos`` or ``partition_prio``."""
    mode: str = "OFF"
    exempt_s: float = 0.0
    qos: Mapping[str, Qos] = field(default_factory=dict)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    hopeless: frozenset[str] = frozenset()
    """Keys of jobs that did not start although cards were freed for them."""

    @classmethod
    def of(cls, config: Mapping[str, str], partitions: Iterable[Partition], qos: Iterable[Qos]) -> PreemptionRules:
        by = config.get("PreemptType", "").partition("/")[2]
        if by not in {"qos", "partition_prio"}:
            return cls()
        exempt_s = values.duration_s(config.get("PreemptExemptTime", "")) or 0
        known = ({item.name: item for item in qos}, {item.name: item for item in partitions})
        return cls(by, _own_mode(config.get("PreemptMode", "OFF")), max(exempt_s, 0), *known)

    def _tier(self, name: str) -> int:
        return int(self.partitions[name].fields.get("PriorityTier", "1")) if name in self.partitions else 1

    @property
    def preemptors(self) -> tuple[frozenset[str], frozenset[str]]:
        """The partitions, or else the QOS, whose jobs may preempt any."""
        if self.by == "qos":
            return frozenset(), frozenset(name for name, item in self.qos.items() if item.preempts)
        lowest = min((self._tier(name) for name in self.partitions), default=1) if self.by else 1
        return frozenset(name for name in self.partitions if self.by and self._tier(name) > lowest), frozenset()

    def may_preempt(self, job: Job) -> bool:
        """Whether the job may preempt any at all."""
        partitions, qos = self.preemptors
        return job.qos in qos or not partitions.isdisjoint(job.partitions)

    def terms(self, job: Job, preemptor: Job) -> PreemptionTerms | None:
        """How Slurm would preempt the running `job` for `preemptor`; None if it would not."""
        if self.by == "qos":
            own, theirs = self.qos.get(job.qos), self.qos.get(preemptor.qos)
            if own is None or theirs is None or own.name not in theirs.preempts:
                return None
            mode, grace_s = _own_mode(own.mode or self.mode), own.grace_s
            exempt_s = self.exempt_s if own.exempt_s is None else own.exempt_s
        else:
            partition = self.partitions.get(job.partitions[0])
            if partition is None or self._tier(partition.name) >= max(map(self._tier, preemptor.partitions)):
                return None
            mode = _own_mode(partition.fields.get("PreemptMode") or self.mode)
            grace_s, exempt_s = float(partition.fields.get("GraceTime") or 0), self.exempt_s
        return PreemptionTerms(mode, grace_s, exempt_s) if mode in HELPS else None

    def exempt(self, job: Job, terms: PreemptionTerms, now_s: float) -> bool:
        """Whether it has not run for long enough."""
        return job.start_s is None or now_s - job.start_s < terms.exempt_s


def _own_mode(text: str) -> str:
    """``GANG,REQUEUE`` preempts by requeueing."""
    return next((word for word in text.upper().split(",") if word not in {"GANG", "WITHIN", ""}), "OFF")


class Demand(NamedTuple):
    """A waiting job that may preempt, and what it needs."""

    job: Job
    pending: snap.PendingJob
    nodes: int
    cards: int
    """A node."""


def demands(rules: PreemptionRules, jobs: Mapping[str, Job], pending: Sequence[snap.PendingJob]) -> Iterator[Demand]:
    """In Slurm's order, in which who may preempt comes first (`observe` sorts them so)."""
    for item in pending:
        job = jobs[item.key]
        if not rules.may_preempt(job):
            return
        if job.key not in rules.hopeless:
            nodes = max(1, job.num_nodes)
            yield Demand(job, item, nodes, -(-item.gpus // nodes))


class Victim(NamedTuple):
    """A running sharer, and how Slurm would preempt it."""

    job: Job
    terms: PreemptionTerms


def _victims(use: CardUse, rules: PreemptionRules, preemptor: Job, now_s: float) -> list[Victim] | None:
    """Who must go for the card to be empty, guests first; None if somebody there may stay, or is on the way there."""
    if use.stranger or use.coming:
        return None
    found = []
    for share in use.occupants:
        terms = rules.terms(share.job, preemptor)
        if share.job.state == "COMPLETING":
            continue
        # Whole cards are Slurm's to free. Up to 23.11.4 the hook asks for them as shards, which Slurm does not manage.
        whole = share.whole and share.job.shard is None
        if terms is None or whole or rules.exempt(share.job, terms, now_s):
            return None
        found.append(Victim(share.job, terms))
    return found[::-1]


def wanted_cards(
    rules: PreemptionRules, jobs: Mapping[str, Job], cards: Mapping[GpuAddress, CardUse], snapshot: snap.Snapshot
) -> frozenset[GpuAddress]:
    """Cards that are being vacated: for each job that waits and may preempt those that cost least, with one half empty
    first. Where these would not do nobody knows which they are: all with sharers that are preemptible by it; and, where
    it wants several on a node, those that are empty already."""
    wanting = list(demands(rules, jobs, snapshot.pending)) if rules.by else []
    if not wanting:
        return frozenset()
    sites = Sites(snapshot)
    found: set[GpuAddress] = set()
    for demand in wanting:
        if chosen := choose(demand, rules, cards, sites, found, snapshot.now_s):
            found |= chosen.keys()
            continue
        for gpu, may in zip(snapshot.gpus, sites.allowed(demand.pending).tolist(), strict=True):
            card = GpuAddress(gpu.node, gpu.index)
            there = cards[card].occupants
            if (may and any(rules.terms(share.job, demand.job) for share in there)) or (demand.cards > 1 and not there):
                found.add(card)
    return frozenset(found)


class Eviction(NamedTuple):
    """What is to be done to a running job now."""

    victim: Victim
    preemptor: Job
    warn: bool
    """Only tell it that its grace begins."""


@dataclass(slots=True)
class _Help:
    """What one waiting job is given."""

    victims: Mapping[int, Victim]
    warned_s: float | None = None
    done_s: float | None = None


class Preemptors:
    """Waiting jobs that are helped, and what became of it."""

    def __init__(self) -> None:
        self._first_s: dict[str, float] = {}
        """Since when enough cards could be freed for a job, by key."""
        self._helps: dict[str, _Help] = {}
        self.hopeless: frozenset[str] = frozenset()

    @property
    def urgent(self) -> bool:
        """Whether somebody is to be helped soon."""
        return bool(self._first_s)

    def look(
        self,
        rules: PreemptionRules,
        jobs: Mapping[str, Job],
        cards: Mapping[GpuAddress, CardUse],
        snapshot: snap.Snapshot,
        now_s: float,
    ) -> list[Eviction]:
        """Whom to put back into the queue, or end, in this order."""
        wanting = list(demands(rules, jobs, snapshot.pending)) if rules.by else []
        self._helps = {demand.job.key: item for demand in wanting if (item := self._helps.get(demand.job.key))}
        self.hopeless &= jobs.keys()
        found: list[Eviction] = []
        taken: set[GpuAddress] = set()
        first_s: dict[str, float] = {}
        sites = Sites(snapshot)
        for demand in wanting:
            key, help_ = demand.job.key, self._helps.get(demand.job.key)
            if help_ is not None and help_.done_s is not None:
                if now_s - help_.done_s > STARTS_WITHIN_S:
                    self.hopeless |= {key}
                continue
            chosen = choose(demand, rules, cards, sites, taken, now_s)
            if not chosen:
                continue
            first_s[key] = self._first_s.get(key, now_s)
            taken |= chosen.keys()
            victims = {victim.job.raw_id: victim for there in chosen.values() for victim in there}
            if victims and now_s - max(first_s[key], demand.job.eligible_s or 0) >= PATIENCE_S:
                found += self._act(demand, victims, now_s)
        self._first_s = first_s
        return found

    def _act(self, demand: Demand, victims: Mapping[int, Victim], now_s: float) -> Iterator[Eviction]:
        help_ = self._helps.setdefault(demand.job.key, _Help(victims))
        grace_s = max(victim.terms.grace_s for victim in victims.values())
        if grace_s and (help_.warned_s is None or not victims.keys() <= help_.victims.keys()):
            help_.victims, help_.warned_s = victims, now_s
            yield from (Eviction(victim, demand.job, True) for victim in victims.values())
        elif not grace_s or now_s - (help_.warned_s or now_s) >= grace_s:
            help_.done_s = now_s
            yield from (Eviction(victim, demand.job, False) for victim in victims.values())


def choose(
    demand: Demand,
    rules: PreemptionRules,
    cards: Mapping[GpuAddress, CardUse],
    sites: Sites,
    taken: Collection[GpuAddress],
    now_s: float,
) -> dict[GpuAddress, list[Victim]]:
    """The cards that cost least, on as many nodes as the job wants; none where that is not enough for it."""
    of_node: dict[str, list[tuple[float, GpuAddress, list[Victim]]]] = defaultdict(list)
    for gpu, may in zip(sites.gpus, sites.allowed(demand.pending).tolist(), strict=True):
        card = GpuAddress(gpu.node, gpu.index)
        victims = _victims(cards[card], rules, demand.job, now_s) if may and card not in taken else None
        if victims is not None:
            lost_s = sum(60.0 + now_s - (victim.job.start_s or now_s) for victim in victims)
            of_node[card.node].append((lost_s, card, victims))
    offers = []
    for name, found in of_node.items():
        cheapest = sorted(found)[: demand.cards]
        leaving = {victim.job.raw_id: victim.job for _, _, victims in cheapest for victim in victims}.values()
        room = next(node for node in sites.nodes if node.name == name)
        enough = (
            room.cpus_free + sum(job.cpus for job in leaving) >= demand.pending.cpus // demand.nodes
            and room.mem_free_mib + sum(job.mem_mib for job in leaving) >= demand.pending.node_mem_mib // demand.nodes
        )
        if len(cheapest) == demand.cards and enough:
            offers.append((sum(lost_s for lost_s, _, _ in cheapest), name, cheapest))
    if len(offers) < demand.nodes:
        return {}
    best = sorted(offers, key=lambda offer: offer[:2])[: demand.nodes]
    return {card: victims for _, _, cheapest in best for _, card, victims in cheapest}
