"""Who is on which GPU now, and what it costs: Slurm's tables, and the store's where it may be read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_gpushare.helper.occupancy import CardShare, CardUse, GpuAddress, place_of
from slurm_gpushare.slurm.gres import model_of_type
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.published import PublicJob


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
class LiveFigures:
    """What is known besides Slurm's tables, by SLURM_JOB_ID. Activity is for those who may read the store."""

    activity: Mapping[int, Activity]
    cost: Mapping[int, Cost]
    cards_won: int | None = None
    """Cards that became empty with one of our jobs next in the queue, and that the helper gave to it; ever since."""
    cards_lost: int | None = None
    hold_s: float | None = None
    """Card time that nodes have kept such cards for."""
    jobs: Mapping[str, PublicJob] = field(default_factory=dict)
    """What the helper published, by key."""
    knowledge: str = ""
    """The knowledge bases that the helper runs on; empty where that is not known."""
    off: Mapping[GpuAddress, str] = field(default_factory=dict)
    """Cards that an administrator has taken out of sharing, and why; for those who may read the store."""


NOTHING_LIVE = LiveFigures({}, {})


@dataclass(frozen=True, slots=True)
class OccupantLine:
    """A job on a GPU."""

    key: str
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
    occupants: tuple[OccupantLine, ...]
    stranger: bool
    """Slurm says that it is in use and does not say by whom."""
    off: bool = False
    """An administrator has taken it out of sharing."""

    @property
    def shared(self) -> bool:
        return sum(not occupant.coming for occupant in self.occupants) > 1

    @property
    def state(self) -> str:
        if not self.usable:
            return "down"
        if self.shared:
            return "shared"
        return "busy" if self.occupants or self.stranger else "idle"

    @property
    def gpu_util_pct(self) -> float | None:
        """The jobs' activity added up; a card cannot do more than all of it."""
        return _total((occupant.activity.gpu_util_pct for occupant in self.occupants), 100.0)

    @property
    def mem_used_pct(self) -> float | None:
        return _total((occupant.activity.mem_used_pct for occupant in self.occupants), 100.0)


def _total(values: Iterable[float | None], most: float) -> float | None:
    known = [value for value in values if value is not None]
    return min(sum(known), most) if known else None


def _occupant_line(share: CardShare, coming: bool, live: LiveFigures) -> OccupantLine:
    job = share.job
    return OccupantLine(
        key=job.key,
        cluster=job.tag.cluster if job.tag else None,
        whole=share.whole,
        coming=coming,
        activity=live.activity.get(job.raw_id, Activity()),
        cost=live.cost.get(job.raw_id, Cost()),
    )


def gpu_lines(
    nodes: Sequence[Node],
    cards: Mapping[GpuAddress, CardUse],
    partitions: frozenset[str],
    live: LiveFigures = NOTHING_LIVE,
) -> list[GpuLine]:
    """Every GPU of `partitions` (empty: of all), in the order of nodes and indices."""
    lines = []
    for node in nodes:
        if partitions and not partitions & set(node.partitions):
            continue
        for index, gres_type in sorted(node.gpus.items()):
            use = cards[GpuAddress(node.name, index)]
            occupants = [_occupant_line(share, False, live) for share in use.occupants]
            occupants += [_occupant_line(share, True, live) for share in use.coming]
            lines.append(
                GpuLine(
                    node=node.name,
                    index=index,
                    model=model_of_type(gres_type),
                    usable=node.usable,
                    shards_used=sum(min(share.shards, use.shards_total) for share in use.occupants),
                    shards_total=use.shards_total,
                    occupants=tuple(occupants),
                    stranger=use.stranger,
                    off=GpuAddress(node.name, index) in live.off,
                )
            )
    return lines


@dataclass(frozen=True, slots=True)
class TaggedJob:
    """A job that takes part."""

    key: str
    uid: int
    partition: str
    state: str
    reason: str
    cluster: int | None
    probe: bool
    card: str | None
    partners: tuple[str, ...]
    cost: Cost
    time_s: int | None = None
    """How long it has run, as Slurm counts."""
    why: str | None = None
    """Why it waits, as the helper says: a code."""
    wait_s: float | None = None
    """Until a whole GPU is expected for it."""
    paused: bool = False
    given_back_s: int = 0


def tagged_jobs(
    jobs: Iterable[Job],
    cards: Mapping[GpuAddress, CardUse],
    live: LiveFigures = NOTHING_LIVE,
    now_s: float | None = None,
) -> list[TaggedJob]:
    """Every job with a tag, in the queue's order."""
    now_s = time.time() if now_s is None else now_s
    where: dict[str, tuple[GpuAddress, list[str]]] = {}
    for card, use in cards.items():
        names = [share.job.key for share in (*use.occupants, *use.coming)]
        for name in names:
            where[name] = (card, [other for other in names if other != name])
    found = []
    for job in jobs:
        if job.tag is None or job.opted_out:
            continue
        place, told = where.get(job.key), live.jobs.get(job.key)
        waiting = told if told and (job.pending or job.paused) else None  # the helper may have spoken before it started
        found.append(
            TaggedJob(
                key=job.key,
                uid=job.uid,
                partition=",".join(job.partitions),
                state=job.state,
                reason=job.reason,
                cluster=job.tag.cluster,
                probe=job.tag.probe,
                card=place_of(job, place[0]) if place else None,
                partners=tuple(place[1]) if place else (),
                cost=live.cost.get(job.raw_id, Cost()),
                time_s=None if (elapsed_s := job.elapsed_s(now_s)) is None else int(elapsed_s),
                why=waiting.reason if waiting else None,
                wait_s=waiting.wait_s if waiting else None,
                paused=job.paused,
                given_back_s=told.given_back_s if told else 0,
            )
        )
    return found
