"""Who is on which GPU now, and what it costs: Slurm's tables, and the store's where it may be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_gpushare.coschedule.occupancy import Card, CardUse, Holding
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job


@dataclass(frozen=True, slots=True)
class Activity:
    """What telemetry last said of a job; None where it said nothing."""

    gpu_util_pct: float | None = None
    mem_used_pct: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What sharing costs a job while it shares, in per cent; None where unknown."""

    predicted_isd_pct: float | None = None
    measured_isd_pct: float | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """What the store adds to Slurm's tables, by SLURM_JOB_ID. Empty for users without access to it."""

    activity: Mapping[int, Activity]
    cost: Mapping[int, Cost]


NOTHING_LIVE = Live({}, {})


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job on a GPU."""

    job_id: str
    cluster: int | None
    whole: bool
    coming: bool
    activity: Activity
    cost: Cost


@dataclass(frozen=True, slots=True)
class GpuLine:
    """One card."""

    node: str
    index: int
    model: str
    usable: bool
    shards_used: int
    shards_total: int
    tenants: tuple[Tenant, ...]
    stranger: bool
    """Slurm says that it is in use and does not say by whom."""

    @property
    def shared(self) -> bool:
        return sum(not tenant.coming for tenant in self.tenants) > 1

    @property
    def state(self) -> str:
        if not self.usable:
            return "down"
        if self.shared:
            return "shared"
        return "busy" if self.tenants or self.stranger else "idle"

    @property
    def gpu_util_pct(self) -> float | None:
        """The jobs' activity added up; a card cannot do more than all of it."""
        return _total((tenant.activity.gpu_util_pct for tenant in self.tenants), 100.0)

    @property
    def mem_used_pct(self) -> float | None:
        return _total((tenant.activity.mem_used_pct for tenant in self.tenants), 100.0)


def _total(values: Iterable[float | None], most: float) -> float | None:
    known = [value for value in values if value is not None]
    return min(sum(known), most) if known else None


def _tenant(holding: Holding, coming: bool, live: Live) -> Tenant:
    job = holding.job
    return Tenant(
        job_id=job.key,
        cluster=job.tag.cluster if job.tag else None,
        whole=holding.whole,
        coming=coming,
        activity=live.activity.get(job.raw_id, Activity()),
        cost=live.cost.get(job.raw_id, Cost()),
    )


def gpu_lines(
    nodes: Sequence[Node], cards: Mapping[Card, CardUse], partitions: frozenset[str], live: Live = NOTHING_LIVE
) -> list[GpuLine]:
    """Every GPU of `partitions` (empty: of all), in the order of nodes and indices."""
    lines = []
    for node in nodes:
        if partitions and not partitions & set(node.partitions):
            continue
        for index, gres_type in sorted(node.gpus.items()):
            use = cards[Card(node.name, index)]
            tenants = [_tenant(holding, False, live) for holding in use.holders]
            tenants += [_tenant(holding, True, live) for holding in use.coming]
            lines.append(
                GpuLine(
                    node=node.name,
                    index=index,
                    model=gres_type.rpartition("_")[0],
                    usable=node.usable,
                    shards_used=sum(min(holding.shards, use.shards_total) for holding in use.holders),
                    shards_total=use.shards_total,
                    tenants=tuple(tenants),
                    stranger=use.stranger,
                )
            )
    return lines


@dataclass(frozen=True, slots=True)
class TaggedJob:
    """A job that takes part."""

    job_id: str
    uid: int
    partition: str
    state: str
    reason: str
    cluster: int | None
    probe: bool
    card: str | None
    partners: tuple[str, ...]
    cost: Cost


def tagged_jobs(jobs: Iterable[Job], cards: Mapping[Card, CardUse], live: Live = NOTHING_LIVE) -> list[TaggedJob]:
    """Every job with a tag, in the queue's order."""
    where: dict[str, tuple[Card, list[str]]] = {}
    for card, use in cards.items():
        names = [holding.job.key for holding in (*use.holders, *use.coming)]
        for name in names:
            where[name] = (card, [other for other in names if other != name])
    found = []
    for job in jobs:
        if job.tag is None:
            continue
        place = where.get(job.key)
        found.append(
            TaggedJob(
                job_id=job.key,
                uid=job.uid,
                partition=",".join(job.partitions),
                state=job.state,
                reason=job.reason,
                cluster=job.tag.cluster,
                probe=job.tag.probe,
                card=str(place[0]) if place else None,
                partners=tuple(place[1]) if place else (),
                cost=live.cost.get(job.raw_id, Cost()),
            )
        )
    return found
