"""Who is on which GPU now, and what it costs: Slurm's tables, and what is known besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_gpushare.helper.occupancy import CardShare, CardUse, GpuAddress, place_of
from slurm_gpushare.report.job_view import JobView, from_queue
from slurm_gpushare.report.sources import LiveFigures
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import model_of_type

NOTHING_LIVE = LiveFigures()


@dataclass(frozen=True, slots=True)
class GpuLine:
    """One card."""

    node: str
    index: int
    model: str
    usable: bool
    shards_used: int
    shards_total: int
    occupants: tuple[JobView, ...]
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
        return _total((occupant.gpu_util_pct for occupant in self.occupants), 100.0)

    @property
    def mem_used_pct(self) -> float | None:
        return _total((occupant.mem_used_pct for occupant in self.occupants), 100.0)


def _total(values: Iterable[float | None], most: float) -> float | None:
    known = [value for value in values if value is not None]
    return min(sum(known), most) if known else None


def _as_it_is_now(job: Job, live: LiveFigures, now_s: float) -> JobView:
    """The job with what is known of it while it lasts."""
    util, memory = live.activity.get(job.raw_id, (None, None))
    expected, measured = live.cost.get(job.raw_id, (None, None))
    return replace(
        from_queue(job, now_s), live=live.jobs.get(job.key), gpu_util_pct=util, mem_used_pct=memory,
        expected_isd_pct=expected, measured_isd_pct=measured,
    )  # fmt: skip


def gpu_lines(
    nodes: Sequence[Node],
    cards: Mapping[GpuAddress, CardUse],
    partitions: frozenset[str],
    now_s: float,
    live: LiveFigures = NOTHING_LIVE,
) -> list[GpuLine]:
    """Every GPU of `partitions` (empty: of all), in the order of nodes and indices."""

    def occupant(share: CardShare, coming: bool) -> JobView:
        return replace(_as_it_is_now(share.job, live, now_s), whole=share.whole, coming=coming)

    lines = []
    for node in nodes:
        if partitions and not partitions & set(node.partitions):
            continue
        for index, gres_type in sorted(node.gpus.items()):
            card = GpuAddress(node.name, index)
            use = cards[card]
            here = [occupant(share, False) for share in use.occupants] + [occupant(share, True) for share in use.coming]
            used = sum(min(share.shards, use.shards_total) for share in use.occupants)
            place = (node.name, index, model_of_type(gres_type), node.usable, used, use.shards_total)
            lines.append(GpuLine(*place, tuple(here), use.stranger, card in live.off))
    return lines


def jobs_that_take_part(
    jobs: Iterable[Job], cards: Mapping[GpuAddress, CardUse], now_s: float, live: LiveFigures = NOTHING_LIVE
) -> list[JobView]:
    """Every job with a tag, in the queue's order: its place, its neighbours, what sharing costs it now."""
    where: dict[str, tuple[GpuAddress, list[str]]] = {}
    for card, use in cards.items():
        names = [share.job.key for share in (*use.occupants, *use.coming)]
        for name in names:
            where[name] = (card, [other for other in names if other != name])
    found = []
    for job in jobs:
        if job.tag is None or job.opted_out:
            continue
        view = _as_it_is_now(job, live, now_s)
        if job.key in where:
            card, partners = where[job.key]
            view = replace(view, card=place_of(job, card), partners=tuple(partners))
        found.append(view)
    return found
