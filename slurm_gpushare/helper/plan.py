"""The plan: which pending job goes to which GPU, and why. A pure function.

Whole GPUs go in priority order (`whole_gpus`), then second halves by the rules of the express lane (`guests`), or by
those of a simpler policy (`baselines`). What is left then may go to long jobs (`long_guests`), and where somebody ends
soon to the head of the queue (`succession`). Gangs join gangs by the same rules, and nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.helper.baselines import join_without_promises
from slurm_gpushare.helper.durations import longest_guest_s
from slurm_gpushare.helper.guest_arrays import (
    OpenResident,
    PairArrays,
    Running,
    as_occupant,
    gang_pairs,
    has_room_beside,
    numbered,
    open_gangs,
    pair_arrays,
    residents_by_model,
    single_pairs,
)
from slurm_gpushare.helper.guests import Join, choose_guests
from slurm_gpushare.helper.long_guests import Backlog, choose_long_guests, first_long
from slurm_gpushare.helper.snapshot import How, LeftToSlurm, Occupant, PendingJob, Placement, Plan, Reasons, Snapshot
from slurm_gpushare.helper.succession import AT_ONCE, ending_first, succeed
from slurm_gpushare.helper.whole_gpus import (
    Floats,
    Ints,
    Sites,
    expected_waits_s,
    first_wanting,
    hand_out,
    mean_duration_s,
)
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel, known_on
from slurm_gpushare.protocol.policy import PolicySettings

Ranked = tuple[int, PendingJob]
BLOCK_KINDS = 64
"""Tokens whose terms are worked out at once; a site with more of them is planned in several blocks.

With 2,000 tokens on 2,500 cards the guests' gain is 0.2 % less than with blocks of 512, in a third of the time."""


def plan(snapshot: Snapshot, knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings) -> Plan:
    """Place pending jobs that opted in; the others only count through their priority.

    Empty cards of all GPU models go in one order. Who joins whom is decided for each model by its own knowledge, among
    jobs that were measured on it.
    """
    queue = _queue(snapshot, settings)
    ours = [(rank, job) for rank, job in queue if job.token is not None]
    if settings.policy == "off":
        return Plan(left=tuple(LeftToSlurm(job.key) for _, job in ours))
    by_rank = dict(ours)
    sites = Sites(snapshot)
    packed = _join_first(snapshot, knowledge, settings, sites, queue)
    placed_first = {placement.key for placement in packed}
    queue = [(rank, job) for rank, job in queue if job.key not in placed_first]
    empty = np.array([i for i, gpu in enumerate(snapshot.gpus) if gpu.usable and not gpu.occupants], np.int64)
    granted = hand_out(sites, empty, queue)
    placements = packed + [_alone(job, snapshot, granted[rank]) for rank, job in ours if rank in granted]
    rest = [(rank, job) for rank, job in queue if rank not in granted]
    waits_s = _waits(snapshot, settings, rest, granted, dict(queue))
    joined = {placement.partner_key for placement in packed}
    own = {rank: gpu for rank, gpu in granted.items() if rank in by_rank}
    for gangs in (False, True):
        guests = _guests(rest, gangs)
        residents = _residents(snapshot, own, by_rank, gangs)
        residents = [resident for resident in residents if resident.job.key not in joined]
        if guests and residents:
            longest_s = longest_guest_s(mean_duration_s(snapshot, gangs), settings)
            wanted = first_wanting(sites, rest, gangs=gangs)
            for model, here in residents_by_model(snapshot, residents).items():
                known = known_on(knowledge, model)
                scene = _Scene(snapshot, known, settings, sites, wanted, waits_s, longest_s, gangs)
                placements += _second_halves(scene, _measured_on(model, guests, placements), here)
    placed = {placement.key for placement in placements}
    left = (LeftToSlurm(job.key, waits_s[rank]) for rank, job in ours if job.key not in placed)
    return Plan(tuple(placements), tuple(left))


def _second_halves(scene: _Scene, guests: list[Ranked], residents: list[OpenResident]) -> list[Placement]:
    """Who joins whom on one GPU model, of single cards' jobs or of gangs."""
    placements: list[Placement] = []
    for some, lanes in _blocks(guests, residents, scene.settings):
        placements += _join(scene, some, lanes)
    if scene.settings.policy == "gpushare":
        placements += _join_long(scene, guests, residents, placements)
        heads, ending = _ending(scene, *_left_over(guests, residents, placements))
        if heads and ending:
            placements += _join(scene, heads, ending, to_succeed=True)
    return placements


def _measured_on(model: str, guests: Sequence[Ranked], placements: Sequence[Placement]) -> list[Ranked]:
    """Those of the jobs that were measured on a GPU model, as they are there, and have no place yet."""
    placed = {placement.key for placement in placements}
    return [(rank, here) for rank, job in guests if job.key not in placed and (here := job.on(model)) is not None]


def _join_first(
    snapshot: Snapshot,
    knowledge: Knowledge | KnowledgeByModel,
    settings: PolicySettings,
    sites: Sites,
    queue: list[Ranked],
) -> list[Placement]:
    """To save card time, second halves are filled before another card is opened."""
    if settings.objective != "saving" or settings.policy != "gpushare":
        return []
    empty = sum(gpu.usable and not gpu.occupants for gpu in snapshot.gpus)
    waits_s = _waits(snapshot, settings, queue, {}, dict(queue), empty)
    placements: list[Placement] = []
    for gangs in (False, True):
        residents, wanted = _residents(snapshot, {}, {}, gangs), first_wanting(sites, queue, gangs=gangs)
        for model, here in residents_by_model(snapshot, residents).items():
            scene = _Scene(snapshot, known_on(knowledge, model), settings, sites, wanted, waits_s, np.inf, gangs)
            guests = _measured_on(model, _guests(queue, gangs), placements)
            for some, lanes in _blocks(guests, here, settings):
                placements += _join(scene, some, lanes)
    return placements


def _guests(queue: Sequence[Ranked], gangs: bool) -> list[Ranked]:
    """The jobs that may join somebody: those for one card, or `gangs`."""
    sharers = ((rank, job) for rank, job in queue if job.token is not None and job.max_isd_pct != 0)
    return [(rank, job) for rank, job in sharers if (job.gang if gangs else job.gpus == 1)]


@dataclass(frozen=True, slots=True)
class _Scene:
    """What all steps of one plan look at."""

    snapshot: Snapshot
    knowledge: Knowledge
    settings: PolicySettings
    sites: Sites
    wanted: Ints  # by GPU, place in the queue of the first job that needs it whole
    waits_s: dict[int, float]  # for a whole card, by place in the queue
    longest_s: float  # of a short guest
    gangs: bool = False  # whether this is about gangs


def _queue(snapshot: Snapshot, settings: PolicySettings) -> list[Ranked]:
    """Jobs that could start, with their place in the queue; ours that have waited too long come first."""
    oldest_s = snapshot.now_s - settings.aged_s
    aged = [job for job in snapshot.pending if job.token is not None and job.eligible_s <= oldest_s]
    if not aged:
        return list(enumerate(snapshot.pending))
    first = {job.key for job in aged}
    return list(enumerate(aged + [job for job in snapshot.pending if job.key not in first]))


def _alone(job: PendingJob, snapshot: Snapshot, at: int) -> Placement:
    gpu = snapshot.gpus[at]
    known = job.on(gpu.model) is not None
    shares = job.max_isd_pct != 0 and known and not _one_process(snapshot, at, job.gang)
    return Placement(job.key, gpu.node, gpu.index, How.ALONE if shares else How.UNSHARED, reasons=Reasons(wait_s=0.0))


def _one_process(snapshot: Snapshot, at: int, gang: bool) -> bool:
    """Whether the card, or for a gang one of its node's, admits a single process only."""
    gpu = snapshot.gpus[at]
    cards = (other for other in snapshot.gpus if other.node == gpu.node) if gang else (gpu,)
    return any(card.exclusive_process for card in cards)


def _residents(
    snapshot: Snapshot, granted: dict[int, int], ours: dict[int, PendingJob], gangs: bool
) -> list[OpenResident]:
    """Sharers of single cards, or `gangs`, with room beside them, those of this plan included, in GPU order."""
    if gangs:
        found = open_gangs(snapshot.gpus)
    else:
        found = [OpenResident(i, gpu.occupants[0]) for i, gpu in enumerate(snapshot.gpus) if has_room_beside(gpu)]
    found += [
        OpenResident(gpu, as_occupant(here))
        for rank, gpu in granted.items()
        if ours[rank].gang is gangs
        and ours[rank].max_isd_pct != 0
        and not _one_process(snapshot, gpu, gangs)
        and (here := ours[rank].on(snapshot.gpus[gpu].model)) is not None
    ]
    return sorted(found, key=lambda resident: resident.gpu)


def _waits(
    snapshot: Snapshot,
    settings: PolicySettings,
    rest: Sequence[Ranked],
    granted: dict[int, int],
    queue: dict[int, PendingJob],
    empty: int = 0,
) -> dict[int, float]:
    """Expected wait for a whole card of each job that is still pending, by place in the queue.

    `empty` cards are there for the first of them.
    """
    first: list[Occupant] = [gpu.occupants[0] for gpu in snapshot.gpus if gpu.usable and gpu.occupants]
    first += [as_occupant(queue[rank]) for rank in granted for _ in range(queue[rank].gpus)]
    free_in_s = Running.of(first, snapshot.now_s, settings).left.middle_s
    work_s = np.array([job.expected_s * job.gpus for _, job in rest], float)
    finite = np.where(np.isfinite(work_s), work_s, 0.0)
    waits_s: Floats = expected_waits_s(np.concatenate([np.zeros(empty), free_in_s]), finite)
    return {rank: float(wait_s) for (rank, _), wait_s in zip(rest, waits_s, strict=True)}


def _blocks(
    guests: list[Ranked], residents: list[OpenResident], settings: PolicySettings
) -> list[tuple[list[Ranked], list[OpenResident]]]:
    """All at once, or, where tokens are many, dealt to blocks by token: no table grows with the square of the site."""
    if not guests or not residents:
        return []
    kinds, kind = numbered([job.token or "" for _, job in guests])
    if len(kinds) <= BLOCK_KINDS or settings.policy != "gpushare":
        return [(guests, residents)]
    blocks = -(-len(kinds) // BLOCK_KINDS)
    dealt: list[list[Ranked]] = [[] for _ in range(blocks)]
    for guest, number in zip(guests, kind.tolist(), strict=True):
        dealt[number % blocks].append(guest)
    lanes = [residents[block::blocks] for block in range(blocks)]
    return [(some, few) for some, few in zip(dealt, lanes, strict=True) if few]


def _left_over(
    guests: list[Ranked], residents: list[OpenResident], placements: Sequence[Placement]
) -> tuple[list[Ranked], list[OpenResident]]:
    """The jobs that have no place yet, and the lanes that nobody joined."""
    placed = {placement.key for placement in placements}
    joined = {placement.partner_key for placement in placements}
    still = [(rank, job) for rank, job in guests if job.key not in placed]
    return still, [resident for resident in residents if resident.job.key not in joined]


def _ending(scene: _Scene, still: list[Ranked], free: list[OpenResident]) -> tuple[list[Ranked], list[OpenResident]]:
    """The first of these jobs, and those of these lanes that end first."""
    left_s = Running.of([resident.job for resident in free], scene.snapshot.now_s, scene.settings).left.middle_s
    return still[:AT_ONCE], [free[i] for i in ending_first(left_s).tolist()]


def _join_long(
    scene: _Scene, guests: list[Ranked], residents: list[OpenResident], placements: Sequence[Placement]
) -> list[Placement]:
    """Long jobs that join what the short have left."""
    still, free = _left_over(guests, residents, placements)
    expected = np.array([job.expected_s for _, job in still], float)
    long = first_long(expected, scene.longest_s)
    if len(long) == 0 or not free:
        return []
    gpus = gang_pairs(scene.snapshot.gpus) if scene.gangs else single_pairs(scene.snapshot.gpus)
    pairs = [gpu.occupants[:2] for gpu in gpus]
    left_s, other_left_s = (
        Running.of([pair[i] for pair in pairs], scene.snapshot.now_s, scene.settings).left.middle_s for i in (0, 1)
    )
    backlog = Backlog(
        short_s=scene.longest_s,
        short_waiting=int((expected <= scene.longest_s).sum()),
        head_rank=still[0][0],
        cards=len(residents) + len(pairs),
        held_s=np.minimum(left_s, other_left_s),
    )
    return _join(scene, [still[i] for i in long.tolist()], free, backlog=backlog)


def _join(
    scene: _Scene,
    guests: list[Ranked],
    residents: list[OpenResident],
    backlog: Backlog | None = None,
    to_succeed: bool = False,
) -> list[Placement]:
    """Who joins whom: as guests, as long guests where `backlog` is given, or as successors."""
    snapshot, settings, sites = scene.snapshot, scene.settings, scene.sites
    jobs = [job for _, job in guests]
    arrays = pair_arrays(snapshot, scene.knowledge, settings, sites, scene.wanted, guests, residents)
    waiting, lanes, terms, compatible = arrays.waiting, arrays.lanes, arrays.terms, arrays.compatible
    waits = np.array([scene.waits_s[rank] for rank, _ in guests], float)
    if to_succeed:
        fits, may_use = compatible.to_succeed, compatible.may_use
        joins = succeed(waiting, lanes, terms, settings, scene.longest_s, waits, fits, may_use)
    elif backlog is not None:
        joins = choose_long_guests(waiting, lanes, terms, settings, backlog, waits, compatible)
    elif settings.policy == "gpushare":
        joins = choose_guests(waiting, lanes, terms, settings, scene.longest_s, lambda some: waits[some], compatible)
    else:
        clusters, lane_clusters = [job.cluster for job in jobs], [resident.job.cluster for resident in residents]
        joins = join_without_promises(waiting, waits, clusters, lanes, lane_clusters, terms, settings, compatible)
    placements = []
    for join in sorted(joins, key=lambda join: join.guest):
        job, resident = jobs[join.guest], residents[join.lane]
        if not sites.has_room(resident.gpu, job):  # a neighbour on the same node took it in this very plan
            continue
        sites.take(resident.gpu, job)
        gpu = snapshot.gpus[resident.gpu]
        promised_pct = settings.promises.of(guest=resident.job.joined, own_pct=resident.job.max_isd_pct)
        reasons = _reasons(join, arrays, float(waits[join.guest]), promised_pct)
        how = How.SUCCEEDS if to_succeed else How.BESIDE if gpu.occupants else How.TOGETHER
        placements.append(Placement(job.key, gpu.node, gpu.index, how, resident.job.key, reasons))
    return placements


def _reasons(join: Join, arrays: PairArrays, wait_s: float, promised_pct: float) -> Reasons:
    """What is expected of a guest and its resident."""
    left_s = float(arrays.lanes.left_s[join.lane])
    run_s = float(arrays.running.done_s[join.lane]) + left_s
    lost_s = float(arrays.running.lost_s[join.lane]) + join.delay_s
    d = float(arrays.waiting.expected_s[join.guest])
    return Reasons(
        wait_s=wait_s,
        guest_isd_pct=(join.stay_s / d - 1.0) * 100.0 if d > 0 else None,
        resident_isd_pct=lost_s / run_s * 100.0 if 0 < run_s < np.inf else None,
        resident_budget_pct=promised_pct,
        shared_s=min(join.stay_s, left_s + join.delay_s),
        gain_s=join.gain_s,
        explored=join.explored,
    )
