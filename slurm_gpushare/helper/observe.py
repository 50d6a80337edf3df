"""From Slurm's tables and the store's knowledge to the snapshot that the plan reads."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slurm_gpushare.helper import log
from slurm_gpushare.helper import snapshot as snap
from slurm_gpushare.helper.durations import Expectation, expect
from slurm_gpushare.helper.occupancy import (
    CardShare,
    CardUse,
    GpuAddress,
    leaving,
    occupancy,
    placeable,
    placed_card,
    startable,
    token_of,
)
from slurm_gpushare.helper.preemption import PreemptionRules, wanted_cards
from slurm_gpushare.helper.queue_facts import QueueFacts, SharingCost, TokenFacts
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.nodes import WITHOUT_SHARDS, Node, Reservation
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import expand, model_of_type, parse_gres, type_index


@dataclass(frozen=True, slots=True)
class View:
    """One look at the Slurm cluster."""

    now_s: float
    jobs: Mapping[str, Job]
    """By key."""
    nodes: Mapping[str, Node]
    cards: Mapping[GpuAddress, CardUse]
    snapshot: snap.Snapshot

    @property
    def gpu_models(self) -> dict[GpuAddress, str]:
        """Under which name each card's rates are kept."""
        return {GpuAddress(gpu.node, gpu.index): gpu.rates_of for gpu in self.snapshot.gpus}

    def free_until_s(self, job: Job) -> float:
        """When the next reservation of one of its nodes begins."""
        nodes = self.snapshot.nodes
        return min((nodes[name].reserved_from_s for name in job.nodes if name in nodes), default=math.inf)


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def expectation(job: Job, workload: TokenFacts) -> Expectation:
    """How long the job should run alone, as was to be expected before it started."""
    limit_s = _number(job.limit_s) - job.given_s
    return expect(workload.duration_s, workload.duration_scatter, workload.runs, limit_s, workload.usual_scatter)


def _may_grow_s(job: Job, facts: QueueFacts) -> float:
    """How much its time limit may be lengthened before it is longer than one of its partitions allows."""
    most_s = min((facts.longest_limit_s.get(name, math.inf) for name in job.partitions), default=math.inf)
    return max(0.0, most_s - _number(job.limit_s)) if math.isfinite(most_s) else math.inf


def _sharing_token(job: Job, facts: QueueFacts) -> str | None:
    """The job's token, if what was measured of it still holds."""
    token = token_of(job)
    return None if token in facts.measure_anew else token


def _occupant(share: CardShare, model: str, facts: QueueFacts, now_s: float) -> snap.Occupant:
    job, token = share.job, _sharing_token(share.job, facts)
    workload = facts.on(model, token)
    shared = facts.sharing.get(job.raw_id, SharingCost())
    return snap.Occupant(
        key=job.key,
        workload=_workload(job, token, workload, facts, job.gang or 1),
        whole=share.whole,
        start_s=job.start_s if job.running else None,
        given_s=job.given_s,
        lost_s=shared.lost_s,
        paused_s=job.paused_s(now_s),
        joined=shared.joined,
        judged=shared.judged,
    )


def _workload(job: Job, token: str | None, known: TokenFacts, facts: QueueFacts, width: int) -> snap.Workload:
    """The job as far as it is the same whether it waits or runs, with what is `known` of its token on a GPU model."""
    expected_s, spread = expectation(job, known)
    return snap.Workload(
        token=token,
        cluster=known.cluster if known.cluster is not None else job.tag.cluster if job.tag else None,
        user=str(job.uid),
        account=job.account,
        mem_used_mib=known.mem_used_mib,
        limit_s=_number(job.limit_s),
        may_grow_s=_may_grow_s(job, facts),
        expected_s=expected_s,
        expected_spread=spread,
        max_isd_pct=job.tag.max_isd_pct if job.tag else None,
        width=width,
    )


AnyJob = TypeVar("AnyJob", snap.Occupant, snap.PendingJob)
_STRANGER = snap.Occupant("?", snap.Workload(), whole=True)


def _gpu(card: GpuAddress, use: CardUse, node: Node, config: Config, facts: QueueFacts, now_s: float) -> snap.Gpu:
    site_model = model_of_type(node.gpus[card.index])
    model = facts.own_name(site_model)
    stay = [share for share in use.occupants if not leaving(share.job, now_s, config.lease_s)]
    occupants = [_occupant(share, model, facts, now_s) for share in (*stay, *use.coming)]
    if use.stranger:
        occupants.append(_STRANGER)
    return snap.Gpu(
        node=card.node,
        index=card.index,
        model=model,
        mem_total_mib=facts.card_mem_mib.get(card.node, facts.default_card_mem_mib.get(model, 0)),
        usable=node.usable
        and use.shards_total >= 2
        and site_model in config.gpu_models
        and bool(set(node.partitions) & set(config.partitions)),
        exclusive_process=card in facts.one_process or card in facts.off or (card in facts.mps and _kills(use, now_s)),
        mps=facts.mps.get(card),
        blind=card in facts.blind,
        occupants=tuple(occupants),
    )


_KILLED_AFTER_S = 3.0
"""A job that takes longer to end than any epilog holds its card is one that has not obeyed, and is killed."""


def _kills(use: CardUse, now_s: float) -> bool:
    """Whether a sharer is being killed: as a client of MPS it may take those beside it along."""
    ending = (share.job for share in use.occupants if share.job.state == "COMPLETING")
    return not all(leaving(job, now_s, _KILLED_AFTER_S) for job in ending)


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """Jobs of a node that Slurm's own figures of its room leave out, or count for longer than they should."""

    coming: list[Job] = field(default_factory=list)
    going: list[Job] = field(default_factory=list)
    suspended: list[Job] = field(default_factory=list)


def _unsettled(
    cards: Mapping[GpuAddress, CardUse], jobs: Iterable[Job], now_s: float, lease_s: float
) -> Mapping[str, _Unsettled]:
    """By node."""
    found: dict[str, _Unsettled] = defaultdict(_Unsettled)
    for card, use in cards.items():
        sent = found[card.node].coming
        sent.extend(share.job for share in use.coming if share.job not in sent)  # a gang comes to every card
    for job in jobs:
        for name in job.nodes:
            if job.state == "SUSPENDED":
                found[name].suspended.append(job)
            if leaving(job, now_s, lease_s):
                found[name].going.append(job)
    return found


def _node_room(node: Node, unsettled: _Unsettled, reservations: Iterable[Reservation], now_s: float) -> snap.NodeRoom:
    # Slurm counts a suspended job's CPUs as free. They are not: it wants them back, and those very ones.
    sent, gone = [*unsettled.coming, *unsettled.suspended], unsettled.going
    cpus = sum(job.cpus for job in sent) - sum(job.cpus for job in gone)
    mem_mib = sum(job.mem_mib for job in sent if not job.running) - sum(job.mem_mib for job in gone)
    current = [r for r in reservations if node.name in r.nodes and r.start_s <= now_s < r.end_s]
    later = [r.start_s for r in reservations if node.name in r.nodes and r.start_s > now_s]
    return snap.NodeRoom(
        name=node.name,
        cpus_free=node.cpus - node.cpus_alloc - cpus,
        mem_free_mib=node.mem_mib - node.mem_alloc_mib - mem_mib,
        partitions=frozenset(node.partitions),
        features=frozenset(node.features),
        usable=node.usable and not any(job.paused for job in unsettled.suspended),
        reservation=current[0].name if current else None,
        reserved_from_s=min(later, default=math.inf),
    )


def _own_type(job: Job) -> str | None:
    """The type that the hook chose where it had to choose one: 22.05 leaks a shard if the job gets another."""
    original = parse_gres(job.tag.original) if job.tag and job.tag.original else ()
    return original[0].type or None if original and original[0].name == "shard" else None


def _gpus_wanted(job: Job, gpus_per_node: int) -> int:
    """On all of its nodes together; all of a node's, where it wants the node entirely (--exclusive)."""
    gpus = sum(gres.count for gres in job.gres if gres.name == "gpu") or job.gang or (1 if job.shard else 0)
    nodes = max(1, job.num_nodes)
    asked = gpus if parse_gres(job.per_job) else gpus * nodes
    return max(asked, nodes * gpus_per_node if job.exclusive else 0)


def _pending(job: Job, now_s: float, config: Config, facts: QueueFacts) -> snap.PendingJob | None:
    """The job as the plan sees it; None if it wants no GPU and no whole node, so that it is in nobody's way."""
    ours, gpus = placeable(job, now_s), _gpus_wanted(job, config.gpus_per_node)
    if not (ours or gpus):
        return None
    token = _sharing_token(job, facts) if ours else None
    width = (job.gang or 1) if ours else 1
    measured = {name: _workload(job, token, facts.on(name, token), facts, width) for name in facts.models_of(token)}
    known = next(iter(measured.values())) if measured else _workload(job, token, TokenFacts(), facts, width)
    own_type = _own_type(job)
    wanted = job.tag.nodes if job.tag and job.tag.nodes else job.wanted_nodes
    return snap.PendingJob(
        key=job.key,
        workload=known,
        gpus=max(1, gpus),
        cpus=job.cpus,
        node_mem_mib=job.mem_mib,
        partitions=frozenset(job.partitions),
        features=frozenset(feature for feature in re.split("[&,]", job.features) if feature),
        nodes_wanted=frozenset(expand(wanted)) if wanted else None,
        gpu_index=type_index(own_type) if own_type else None,
        gpu_model=facts.own_name(model_of_type(own_type)) if own_type else None,
        nodes_excluded=facts.avoid.get(job.key, frozenset()) | frozenset(job.excluded_nodes),
        reservation=job.reservation or None,
        eligible_s=float(min(job.eligible_s, int(now_s)) if job.eligible_s else job.submit_s),
        measured=measured if _must_choose(measured, facts) else None,
    )


def _must_choose(measured: Mapping[str, snap.Workload], facts: QueueFacts) -> bool:
    """Whether it matters which GPU model the job gets: not where one is shared and the job was measured on it."""
    shared = set(facts.own_names.values())
    return bool(measured) and (len(shared) > 1 or not shared <= measured.keys())


def _rank(job: Job, tiers: Mapping[str, int], rules: PreemptionRules) -> tuple[int, int, int, int, int]:
    """The order in which Slurm considers pending jobs, the first one lowest: who may preempt comes before priority."""
    tier = max(tiers.get(name, 1) for name in job.partitions)
    return -rules.may_preempt(job), -tier, -job.priority, job.raw_id, job.task_id or 0


def _limited(item: AnyJob, of_job: Mapping[str, tuple[str, ...]]) -> AnyJob:
    """The same with the limits that it counts for; jobs of others are Slurm's to limit."""
    limits = of_job.get(item.key, ()) if item.workload.token is not None else ()
    own = replace(item, workload=replace(item.workload, limits=limits))
    if isinstance(own, snap.PendingJob) and own.measured is not None:
        measured = {model: replace(workload, limits=limits) for model, workload in own.measured.items()}
        own = replace(own, measured=measured)
    return own


def observe(
    jobs: Collection[Job],
    nodes: Collection[Node],
    config: Config,
    facts: QueueFacts,
    now_s: float,
) -> View:
    """The cluster as it is now."""
    cards = occupancy(nodes, jobs)
    by_name = {node.name: node for node in nodes}
    unsettled = _unsettled(cards, jobs, now_s, config.lease_s)
    waiting = [job for job in jobs if startable(job, now_s) and placed_card(job) is None]
    waiting.sort(key=lambda job: _rank(job, facts.tiers, facts.preemption))
    pending = (_pending(job, now_s, config, facts) for job in waiting)
    snapshot = snap.Snapshot(
        now_s=now_s,
        gpus=tuple(_gpu(card, use, by_name[card.node], config, facts, now_s) for card, use in cards.items()),
        nodes={node.name: _node_room(node, unsettled[node.name], facts.reservations, now_s) for node in nodes},
        pending=tuple(job for job in pending if job is not None),
        never_together=facts.never_together,
        mean_duration_s=facts.mean_duration_s,
    )
    by_key = {job.key: job for job in jobs}
    of_job, room = facts.limits.room(jobs, cards)
    if room:
        snapshot = replace(
            snapshot,
            limits=room,
            pending=tuple(_limited(item, of_job) for item in snapshot.pending),
            gpus=tuple(
                replace(gpu, occupants=tuple(_limited(item, of_job) for item in gpu.occupants)) for gpu in snapshot.gpus
            ),
        )
    if vacating := wanted_cards(facts.preemption, by_key, cards, snapshot):
        gpus = (replace(gpu, vacating=GpuAddress(gpu.node, gpu.index) in vacating) for gpu in snapshot.gpus)
        snapshot = replace(snapshot, gpus=tuple(gpus))
    return View(now_s=now_s, jobs=by_key, nodes=by_name, cards=cards, snapshot=snapshot)


# Shards that Slurm has lost: 22.05 forgets those in use when slurmctld restarts, and jobs for them wait for ever.


class LostShards:
    """Says it once, when shards go and when they are back."""

    def __init__(self) -> None:
        self._lost: dict[str, list[int]] = {}

    def look(self, nodes: Iterable[Node], shards_per_gpu: int) -> None:
        lost = {node.name: gpus for node in nodes if (gpus := node.lost_shards(shards_per_gpu))}
        for name, gpus in lost.items():
            if self._lost.get(name) != gpus:
                text = ",".join(map(str, gpus))
                log.warning(
                    "lost-shards",
                    node=name,
                    gpus=text,
                    error="jobs for them wait for ever or are refused",
                    hint=WITHOUT_SHARDS,
                )
        for name in self._lost.keys() - lost.keys():
            log.info("shards-back", node=name)
        self._lost = lost
