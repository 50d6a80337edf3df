"""From Slurm's tables and the store's knowledge to the snapshot that the plan reads."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule import snapshot as snap
from slurm_gpushare.coschedule.expect import from_history_s
from slurm_gpushare.coschedule.occupancy import Card, CardUse, Holding, occupancy, placed_card
from slurm_gpushare.coschedule.settings import LIMIT_USE
from slurm_gpushare.slurm.gres import parse_gres, type_index
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.site import Reservation

# A pending job with another reason (a limit, a licence, a dependency) would not start wherever we put it.
STARTABLE = frozenset({"", "Priority", "Resources", "BeginTime", "Cleaning", "NodeDown"})
_PLAIN_FEATURES = re.compile(r"[\w.-]+(?:[&,][\w.-]+)*")


@dataclass(frozen=True, slots=True)
class Workload:
    """What the store knows of a token."""

    cluster: int | None = None
    mem_used_mib: int | None = None
    duration_s: float | None = None
    duration_scatter: float | None = None  # of the logarithm; None for a single run


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a running job has been through on its card."""

    lost_s: float = 0.0
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything besides Slurm that the snapshot needs."""

    workloads: Mapping[str, Workload] = field(default_factory=dict)
    sharing: Mapping[int, Sharing] = field(default_factory=dict)
    """By SLURM_JOB_ID."""
    card_mem_mib: Mapping[str, int] = field(default_factory=dict)
    """Memory of a node's GPUs, where telemetry has told it."""
    default_card_mem_mib: int = 0
    never_together: frozenset[tuple[str, str]] = frozenset()
    avoid: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Nodes on which a job (by key) was placed in vain."""


@dataclass(frozen=True, slots=True)
class View:
    """One look at the cluster."""

    now_s: float
    jobs: Mapping[str, Job]
    """By key."""
    nodes: Mapping[str, Node]
    cards: Mapping[Card, CardUse]
    snapshot: snap.Snapshot


def whose(job: Job) -> str | None:
    """The token of a job that takes part in sharing; a probed job does not yet."""
    return job.tag.token if job.tag and not job.tag.probe else None


def leased(job: Job, now_s: float) -> bool:
    """Whether the job waits for nothing but our own lease."""
    return bool(job.tag and job.tag.lease and (job.eligible_s is None or job.eligible_s > now_s))


def placeable(job: Job, now_s: float) -> bool:
    """Whether we may place this pending job now: it opted in, can start, and asks what a shard can give."""
    wants = [gres for gres in parse_gres(job.per_node) if gres.count]
    return (
        whose(job) is not None
        and job.tag is not None
        and job.tag.original is not None
        and job.num_nodes == 1
        and not (job.het or job.exclusive or job.per_gpu_extras)
        and len(wants) == 1 == len([gres for gres in job.gres if gres.count])
        and (not job.features or _PLAIN_FEATURES.fullmatch(job.features) is not None)
        and startable(job, now_s)
    )


def startable(job: Job, now_s: float) -> bool:
    """Whether only room, or our lease, keeps a pending job from starting."""
    begins_later = job.eligible_s is None or job.eligible_s > now_s
    return (
        job.pending
        and not job.held
        and not job.dependency
        and job.reason in STARTABLE
        and (not begins_later or leased(job, now_s))
    )


def leaving(job: Job, now_s: float, bound_s: float) -> bool:
    """Whether it has ended and only its epilog is in the way: a job sent to its card now is there before any other.

    One whose epilog hangs for longer than a placement would last still holds its card.
    """
    ended_s = math.inf if job.end_s is None else now_s - job.end_s
    return job.state == "COMPLETING" and job.num_nodes == 1 and ended_s < bound_s


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def expectation(job: Job, workload: Workload) -> tuple[float, snap.DurationSource]:
    """How long the job should run alone: its token's earlier runs, weighed against its limit if they scatter."""
    limit_s = _number(job.limit_s)
    if workload.duration_s is None:
        return limit_s, snap.DurationSource.LIMIT
    expected_s = workload.duration_s
    if workload.duration_scatter is not None and expected_s > 0 and math.isfinite(limit_s):
        history = np.array([expected_s]), np.array([workload.duration_scatter])
        expected_s = float(from_history_s(*history, np.array([limit_s]), LIMIT_USE)[0])
    return expected_s, snap.DurationSource.HISTORY


def _occupant(holding: Holding, facts: Facts) -> snap.Occupant:
    job, token = holding.job, whose(holding.job)
    workload = facts.workloads.get(token or "", Workload())
    expected_s, source = expectation(job, workload)
    shared = facts.sharing.get(job.raw_id, Sharing())
    return snap.Occupant(
        job_id=job.key,
        token=token,
        cluster=workload.cluster if workload.cluster is not None else job.tag.cluster if job.tag else None,
        user=str(job.uid),
        account=job.account,
        whole=holding.whole,
        mem_used_mib=workload.mem_used_mib,
        start_s=job.start_s if job.running else None,
        limit_s=_number(job.limit_s),
        expected_s=expected_s,
        expected_source=source,
        lost_s=shared.lost_s,
        joined=shared.joined,
        max_isd_pct=job.tag.max_isd_pct if job.tag else None,
    )


_STRANGER = snap.Occupant(job_id="?", token=None, whole=True)


def _gpu(card: Card, use: CardUse, node: Node, config: Config, facts: Facts, now_s: float) -> snap.Gpu:
    stay = [holding for holding in use.holders if not leaving(holding.job, now_s, config.lease_s)]
    occupants = [_occupant(holding, facts) for holding in (*stay, *use.coming)]
    if use.stranger:
        occupants.append(_STRANGER)
    return snap.Gpu(
        node=card.node,
        index=card.index,
        model=config.gpu_model,
        mem_total_mib=facts.card_mem_mib.get(card.node, facts.default_card_mem_mib),
        usable=node.usable and use.shards_total >= 2 and bool(set(node.partitions) & set(config.partitions)),
        occupants=tuple(occupants),
    )


def _snapshot_node(
    node: Node, coming: Iterable[Job], going: Iterable[Job], reservations: Iterable[Reservation], now_s: float
) -> snap.Node:
    sent, gone = list(coming), list(going)
    cpus = sum(job.cpus for job in sent) - sum(job.cpus for job in gone)
    mem_mib = sum(job.mem_mib for job in sent) - sum(job.mem_mib for job in gone)
    current = [r for r in reservations if node.name in r.nodes and r.start_s <= now_s < r.end_s]
    later = [r.start_s for r in reservations if node.name in r.nodes and r.start_s > now_s]
    return snap.Node(
        name=node.name,
        cpus_free=node.cpus - node.cpus_alloc - cpus,
        mem_free_mib=node.mem_mib - node.mem_alloc_mib - mem_mib,
        partitions=frozenset(node.partitions),
        features=frozenset(node.features),
        usable=node.usable,
        reservation=current[0].name if current else None,
        reserved_from_s=min(later, default=math.inf),
    )


def _own_index(job: Job) -> int | None:
    """The index that the hook chose where it had to choose one: 22.05 leaks a shard if the job gets another."""
    original = parse_gres(job.tag.original) if job.tag and job.tag.original else ()
    return type_index(original[0].type) if original and original[0].name == "shard" and original[0].type else None


def _pending(job: Job, now_s: float, config: Config, facts: Facts) -> snap.PendingJob | None:
    """The job as the plan sees it; None if it wants no GPU and no whole node, so that it is in nobody's way."""
    ours = placeable(job, now_s)
    gpus = sum(gres.count for gres in job.gres if gres.name == "gpu") or (1 if job.shard else 0)
    per_node = gpus if parse_gres(job.per_job) else gpus * max(1, job.num_nodes)
    whole_nodes = job.num_nodes if job.exclusive or gpus >= config.gpus_per_node else 0
    if not (ours or per_node or whole_nodes):
        return None
    token = whose(job) if ours else None
    workload = facts.workloads.get(token or "", Workload())
    expected_s, source = expectation(job, workload)
    wanted = job.tag.nodes if job.tag and job.tag.nodes else job.wanted_nodes
    return snap.PendingJob(
        job_id=job.key,
        token=token,
        cluster=workload.cluster if workload.cluster is not None else job.tag.cluster if job.tag else None,
        user=str(job.uid),
        account=job.account,
        gpus=max(1, per_node),
        whole_nodes=whole_nodes,
        mem_used_mib=workload.mem_used_mib,
        cpus=job.cpus,
        node_mem_mib=job.mem_mib,
        partitions=frozenset(job.partitions),
        features=frozenset(feature for feature in re.split("[&,]", job.features) if feature),
        nodes_wanted=frozenset(expand(wanted)) if wanted else None,
        gpu_index=_own_index(job),
        nodes_excluded=facts.avoid.get(job.key, frozenset()) | frozenset(job.excluded_nodes),
        reservation=job.reservation or None,
        limit_s=_number(job.limit_s),
        expected_s=expected_s,
        expected_source=source,
        eligible_s=float(min(job.eligible_s, int(now_s)) if job.eligible_s else job.submit_s),
        max_isd_pct=job.tag.max_isd_pct if job.tag else None,
    )


def observe(
    jobs: Collection[Job],
    nodes: Collection[Node],
    reservations: Collection[Reservation],
    config: Config,
    facts: Facts,
    now_s: float,
    tiers: Mapping[str, int] | None = None,
) -> View:
    """The cluster as it is now. `tiers` are the partitions' PriorityTier: Slurm looks at it before the priority."""
    tiers = tiers or {}
    cards = occupancy(nodes, jobs)
    by_name = {node.name: node for node in nodes}
    coming: dict[str, list[Job]] = {}
    for card, use in cards.items():
        coming.setdefault(card.node, []).extend(holding.job for holding in use.coming)
    going: dict[str, list[Job]] = {}
    for job in jobs:
        if leaving(job, now_s, config.lease_s):
            for name in job.nodes:
                going.setdefault(name, []).append(job)
    waiting = [job for job in jobs if startable(job, now_s) and placed_card(job) is None]
    waiting.sort(
        key=lambda job: (
            -max(tiers.get(name, 1) for name in job.partitions),
            -job.priority,
            job.raw_id,
            job.task_id or 0,
        )
    )
    pending = (_pending(job, now_s, config, facts) for job in waiting)
    return View(
        now_s=now_s,
        jobs={job.key: job for job in jobs},
        nodes=by_name,
        cards=cards,
        snapshot=snap.Snapshot(
            now_s=now_s,
            gpus=tuple(_gpu(card, use, by_name[card.node], config, facts, now_s) for card, use in cards.items()),
            nodes={
                name: _snapshot_node(node, coming.get(name, ()), going.get(name, ()), reservations, now_s)
                for name, node in by_name.items()
            },
            pending=tuple(job for job in pending if job is not None),
            never_together=facts.never_together,
        ),
    )
