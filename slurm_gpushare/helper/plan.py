"""The plan: which pending job goes to which GPU, and why. A pure function.

Empty cards go in priority order (`places`), then second halves, step by step (`second_halves`), by the rules in
`rules`. Jobs are matched with places as wide as they are: a gang, which has all cards of a node, joins gangs, and a job
for one card those that have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slurm_gpushare.helper.lanes import Asked, PlanInput, Ranked, SiteHalves, running
from slurm_gpushare.helper.places import Lane, Sites, expected_waits_s, first_wanting, hand_out, next_owners, open_lanes
from slurm_gpushare.helper.second_halves import Step, steps
from slurm_gpushare.helper.snapshot import How, LeftToSlurm, Occupant, PendingJob, Placement, Plan, Reasons, Snapshot
from slurm_gpushare.knowledge.rates import Floats, Ints, Knowledge, KnowledgeByModel
from slurm_gpushare.protocol.policy import PolicySettings

Granted = Mapping[int, tuple[int, PendingJob]]
"""Jobs that get empty cards, with the first of these, by place in the queue."""


def plan(snapshot: Snapshot, knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings) -> Plan:
    """Place pending jobs that opted in; the others only count through their priority.

    Empty cards of all GPU models go in one order. Who joins whom is decided for each model by its own knowledge, among
    jobs that were measured on it.
    """
    queue = _queue(snapshot, settings)
    ours = [(rank, job) for rank, job in queue if job.workload.token is not None]
    if settings.policy == "off":
        return Plan(left=tuple(LeftToSlurm(job.key) for _, job in ours))
    view = PlanInput(snapshot, knowledge, settings, Sites(snapshot))
    empty = np.array(
        [i for i, gpu in enumerate(snapshot.gpus) if gpu.usable and not (gpu.occupants or gpu.vacating)], np.int64
    )
    placements: list[Placement] = []
    if first := steps(settings, before_whole=True):
        waits_s = _waits(view, queue, {}, len(empty))
        placements = _share(view, queue, {}, waits_s, first)
        placed = {placement.key for placement in placements}
        queue = [(rank, job) for rank, job in queue if job.key not in placed]
    by_rank = dict(queue)
    granted = {rank: (gpu, by_rank[rank]) for rank, gpu in hand_out(view.sites, empty, queue).items()}
    rest = [(rank, job) for rank, job in queue if rank not in granted]
    waits_s = _waits(view, rest, granted)
    own = {rank: granted[rank] for rank, _ in ours if rank in granted}
    joined = {placement.partner_key for placement in placements}
    placements += [_alone(view, gpu, job) for gpu, job in own.values()]
    placements += _share(view, rest, own, waits_s, steps(settings), joined)
    placed = {placement.key for placement in placements}
    left = (LeftToSlurm(job.key, waits_s[rank]) for rank, job in ours if job.key not in placed)
    return Plan(tuple(placements), tuple(left))


def _queue(snapshot: Snapshot, settings: PolicySettings) -> list[Ranked]:
    """Jobs that could start, with their place in the queue; ours that have waited too long come first."""
    oldest_s = snapshot.now_s - settings.aged_s
    aged = [job for job in snapshot.pending if job.workload.token is not None and job.eligible_s <= oldest_s]
    if not aged:
        return list(enumerate(snapshot.pending))
    first = {job.key for job in aged}
    return list(enumerate(aged + [job for job in snapshot.pending if job.key not in first]))


def _alone(view: PlanInput, gpu: int, job: PendingJob) -> Placement:
    how = How.ALONE if _lane_beside(view, gpu, job) else How.UNSHARED
    return Placement(job.key, view.sites.place(gpu, job.workload.width), how, reasons=Reasons(wait_s=0.0))


def _lane_beside(view: PlanInput, gpu: int, job: PendingJob) -> Lane | None:
    """The lane beside a job that has just got empty cards; None if it shares with nobody there."""
    gpus = view.snapshot.gpus
    here, cards = job.on(gpus[gpu].model), view.sites.cards(gpu, job.workload.width)
    if here is None or not job.shares or any(gpus[card].exclusive_process for card in cards):
        return None
    return Lane(gpu, Occupant(job.key, here.workload))


def _waits(view: PlanInput, rest: Sequence[Ranked], granted: Granted, empty: int = 0) -> dict[int, float]:
    """Expected wait for a whole card of each job that is still pending, by place in the queue.

    `empty` cards are there for the first of them.
    """
    first = [gpu.occupants[0] for gpu in view.snapshot.gpus if gpu.usable and gpu.occupants]
    first += [Occupant(job.key, job.workload) for _, job in granted.values() for _ in range(job.gpus)]
    free_in_s = running(first, view.snapshot.now_s, view.settings).ahead.left.middle_s
    work_s = np.array([job.workload.expected_s * job.gpus for _, job in rest], float)
    finite = np.where(np.isfinite(work_s), work_s, 0.0)
    waits_s: Floats = expected_waits_s(np.concatenate([np.zeros(empty), free_in_s]), finite)
    return {rank: float(wait_s) for (rank, _), wait_s in zip(rest, waits_s, strict=True)}


def _share(
    view: PlanInput,
    queue: Sequence[Ranked],
    own: Granted,
    waits_s: Mapping[int, float],
    steps_: Iterable[Step],
    joined: Iterable[str | None] = (),
) -> list[Placement]:
    """Who joins whom, width by width and model by model, but nobody those that are `joined` already."""
    found: list[Placement] = []
    gpus, taken = view.snapshot.gpus, set(joined)
    for width in sorted({job.workload.width for _, job in queue if job.shares}):
        beside = (_lane_beside(view, gpu, job) for gpu, job in own.values() if job.workload.width == width)
        lanes = [*open_lanes(gpus, width), *(lane for lane in beside if lane is not None)]
        lanes = sorted((lane for lane in lanes if lane.resident.key not in taken), key=lambda lane: lane.gpu)
        wanted, next_owner = first_wanting(view.sites, queue, width), owners_of_next(view, queue, own)
        for here in by_rates(view.snapshot, lanes):
            model = gpus[here[0].gpu].model
            placed = {placement.key for placement in found}
            asking = ((rank, job) for rank, job in queue if job.shares and job.workload.width == width)
            guests = [(r, j) for r, job in asking if job.key not in placed and (j := job.on(model)) is not None]
            if guests:
                halves = SiteHalves(view, Asked(width, guests, here, wanted, next_owner, waits_s))
                for step in steps_:
                    step(halves)
                found += halves.placements
    return found


def owners_of_next(view: PlanInput, queue: Iterable[Ranked], own: Granted) -> Ints:
    """`next_owners`, by when each card is expected to be free of all that it has and that it was given just now."""
    gpus = view.snapshot.gpus
    there = [(at, occupant) for at, gpu in enumerate(gpus) for occupant in gpu.occupants]
    there += [(gpu, Occupant(job.key, job.workload)) for gpu, job in own.values()]
    free_in_s: Floats = np.where([gpu.usable for gpu in gpus], 0.0, np.inf)
    left_s = running([occupant for _, occupant in there], view.snapshot.now_s, view.settings).ahead.left.middle_s
    np.maximum.at(free_in_s, [at for at, _ in there], left_s)
    return next_owners(view.sites, queue, free_in_s)


def by_rates(snapshot: Snapshot, lanes: Sequence[Lane]) -> Iterable[list[Lane]]:
    """The lanes of each GPU model, those under MPS apart: nobody is matched across models."""
    found: dict[str, list[Lane]] = {}
    for lane in lanes:
        found.setdefault(snapshot.gpus[lane.gpu].rates_of, []).append(lane)
    return found.values()
