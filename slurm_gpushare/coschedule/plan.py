"""The plan: which pending job goes to which GPU, and why. A pure function.

Whole GPUs go in priority order (`whole`), then second halves by the rules of the express lane (`lanes`), or by those
of a simpler policy (`simple`). What is then left where somebody ends soon goes to the head of the queue (`succession`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_gpushare.coschedule.constraints import Ints, Sites, first_wanting
from slurm_gpushare.coschedule.expect import longest_guest_s
from slurm_gpushare.coschedule.halves import (
    Compatible,
    Resident,
    Running,
    as_occupant,
    expected_s,
    has_room_beside,
    lanes_of,
    promise_pct,
    terms_between,
    waiting_of,
)
from slurm_gpushare.coschedule.lanes import fill_lanes
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.coschedule.simple import join_simply
from slurm_gpushare.coschedule.snapshot import (
    How,
    LeftToSlurm,
    Occupant,
    PendingJob,
    Placement,
    Plan,
    Reasons,
    Snapshot,
)
from slurm_gpushare.coschedule.succession import AT_ONCE, ending_first, succeed
from slurm_gpushare.coschedule.waits import Floats, expected_waits_s
from slurm_gpushare.coschedule.whole import hand_out
from slurm_gpushare.knowledge.rates import Knowledge

Ranked = tuple[int, PendingJob]
BLOCK_KINDS = 512
"""Tokens whose terms are worked out at once; a site with more of them is planned in several blocks."""


def plan(snapshot: Snapshot, knowledge: Knowledge, settings: PolicySettings) -> Plan:
    """Place pending jobs that opted in; the others only count through their priority."""
    queue = _queue(snapshot, settings)
    ours = [(rank, job) for rank, job in queue if job.token is not None]
    if settings.policy == "off":
        return Plan(left=tuple(LeftToSlurm(job.job_id, "sharing is off") for _, job in ours))
    by_rank = dict(ours)
    sites = Sites(snapshot)
    empty = np.array([i for i, gpu in enumerate(snapshot.gpus) if gpu.usable and not gpu.occupants], np.int64)
    granted = hand_out(sites, empty, queue)
    placements = [_alone(job, snapshot, granted[rank]) for rank, job in ours if rank in granted]
    rest = [(rank, job) for rank, job in queue if rank not in granted]
    guests = [(rank, job) for rank, job in rest if job.token is not None and job.gpus == 1 and job.max_isd_pct != 0]
    residents = _residents(snapshot, {rank: gpu for rank, gpu in granted.items() if rank in by_rank}, by_rank)
    waits_s = _waits(snapshot, settings, rest, granted, dict(queue))
    longest_s = longest_guest_s(_mean_duration_s(snapshot, settings), settings)
    wanted = first_wanting(sites, rest)
    for some, lanes in _blocks(guests, residents, settings):
        placements += _join(snapshot, knowledge, settings, sites, some, lanes, wanted, waits_s, longest_s)
    if settings.policy == "gpushare":
        heads, ending = _left_over(guests, residents, placements, snapshot, settings)
        if heads and ending:
            placements += _join(snapshot, knowledge, settings, sites, heads, ending, wanted, waits_s, longest_s, True)
    placed = {placement.job_id for placement in placements}
    left = (
        LeftToSlurm(job.job_id, _why(job, longest_s, waits_s[rank], settings))
        for rank, job in ours
        if job.job_id not in placed
    )
    return Plan(tuple(placements), tuple(left))


def _queue(snapshot: Snapshot, settings: PolicySettings) -> list[Ranked]:
    """Jobs that could start, with their place in the queue; ours that have waited too long come first."""

    def aged(job: PendingJob) -> bool:
        return job.token is not None and snapshot.now_s - job.eligible_s >= settings.aged_s

    jobs = [job for job in snapshot.pending if job.eligible]
    return list(enumerate(sorted(jobs, key=lambda job: not aged(job))))


def _alone(job: PendingJob, snapshot: Snapshot, at: int) -> Placement:
    gpu = snapshot.gpus[at]
    shares = job.max_isd_pct != 0 and not gpu.exclusive_process
    return Placement(
        job.job_id, gpu.node, gpu.index, How.ALONE if shares else How.UNSHARED, reasons=Reasons(wait_s=0.0)
    )


def _residents(snapshot: Snapshot, granted: dict[int, int], ours: dict[int, PendingJob]) -> list[Resident]:
    """Sharers with room beside them, those that this plan places included, in GPU order."""
    found = [Resident(i, gpu.occupants[0]) for i, gpu in enumerate(snapshot.gpus) if has_room_beside(gpu)]
    found += [
        Resident(gpu, as_occupant(ours[rank]))
        for rank, gpu in granted.items()
        if ours[rank].max_isd_pct != 0 and not snapshot.gpus[gpu].exclusive_process
    ]
    return sorted(found, key=lambda resident: resident.gpu)


def _waits(
    snapshot: Snapshot,
    settings: PolicySettings,
    rest: Sequence[Ranked],
    granted: dict[int, int],
    queue: dict[int, PendingJob],
) -> dict[int, float]:
    """Expected wait for a whole card of each job that is still pending, by place in the queue."""
    first: list[Occupant] = [gpu.occupants[0] for gpu in snapshot.gpus if gpu.usable and gpu.occupants]
    first += [as_occupant(queue[rank]) for rank in granted]
    free_in_s = Running.of(first, snapshot.now_s, settings).left_s
    work_s = np.array([expected_s(job, settings.limit_use) * job.gpus for _, job in rest], float)
    finite = np.where(np.isfinite(work_s), work_s, 0.0)
    waits_s: Floats = expected_waits_s(free_in_s, finite)
    return {rank: float(wait_s) for (rank, _), wait_s in zip(rest, waits_s, strict=True)}


def _mean_duration_s(snapshot: Snapshot, settings: PolicySettings) -> float:
    if snapshot.mean_duration_s is not None:
        return snapshot.mean_duration_s
    jobs: list[PendingJob | Occupant] = [job for job in snapshot.pending if job.token is not None]
    jobs += [job for gpu in snapshot.gpus for job in gpu.occupants if job.token is not None]
    known = [s for job in jobs if np.isfinite(s := expected_s(job, settings.limit_use))]
    return float(np.mean(known)) if known else 0.0


def _blocks(
    guests: list[Ranked], residents: list[Resident], settings: PolicySettings
) -> list[tuple[list[Ranked], list[Resident]]]:
    """All at once, or, where tokens are many, dealt to blocks by token: no table grows with the square of the site."""
    if not guests or not residents:
        return []
    kinds, kind = _index([job.token or "" for _, job in guests])
    if len(kinds) <= BLOCK_KINDS or settings.policy != "gpushare":
        return [(guests, residents)]
    blocks = -(-len(kinds) // BLOCK_KINDS)
    dealt: list[list[Ranked]] = [[] for _ in range(blocks)]
    for guest, number in zip(guests, kind.tolist(), strict=True):
        dealt[number % blocks].append(guest)
    lanes = [residents[block::blocks] for block in range(blocks)]
    return [(some, few) for some, few in zip(dealt, lanes, strict=True) if few]


def _left_over(
    guests: list[Ranked],
    residents: list[Resident],
    placements: Sequence[Placement],
    snapshot: Snapshot,
    settings: PolicySettings,
) -> tuple[list[Ranked], list[Resident]]:
    """The first of the jobs that have no place yet, and of the lanes that nobody joined those that end first."""
    placed = {placement.job_id for placement in placements}
    joined = {placement.partner_job_id for placement in placements}
    heads = [(rank, job) for rank, job in guests if job.job_id not in placed][:AT_ONCE]
    free = [resident for resident in residents if resident.job.job_id not in joined]
    left_s = Running.of([resident.job for resident in free], snapshot.now_s, settings).left_s
    return heads, [free[i] for i in ending_first(left_s).tolist()]


def _index(tokens: Sequence[str]) -> tuple[list[str], Ints]:
    names = list(dict.fromkeys(tokens))
    at = {name: i for i, name in enumerate(names)}
    return names, np.array([at[token] for token in tokens], np.int64)


def _join(
    snapshot: Snapshot,
    knowledge: Knowledge,
    settings: PolicySettings,
    sites: Sites,
    guests: list[Ranked],
    residents: list[Resident],
    wanted: Ints,
    waits_s: dict[int, float],
    longest_s: float,
    to_succeed: bool = False,
) -> list[Placement]:
    """Who joins whom, as guests or as successors."""
    jobs = [job for _, job in guests]
    guest_tokens, guest_kind = _index([job.token or "" for job in jobs])
    lane_tokens, lane_kind = _index([resident.job.token or "" for resident in residents])
    terms = terms_between(guest_tokens, lane_tokens, knowledge, snapshot.never_together, settings)
    running = Running.of([resident.job for resident in residents], snapshot.now_s, settings)
    gpus = np.array([resident.gpu for resident in residents], np.int64)
    lanes = lanes_of(residents, running, lane_kind, wanted[gpus], settings)
    ranks = np.array([rank for rank, _ in guests], np.int64)
    waits = np.array([waits_s[rank] for rank, _ in guests], float)
    waiting = waiting_of(jobs, ranks, guest_kind, settings)
    compatible = Compatible(sites, jobs, waiting, residents, running, lanes, terms, settings)
    if to_succeed:
        joins = succeed(waiting, lanes, terms, settings, longest_s, waits, compatible.to_succeed, compatible.may_use)
    elif settings.policy == "gpushare":
        joins = fill_lanes(waiting, lanes, terms, settings, longest_s, lambda some: waits[some], compatible)
    else:
        clusters, lane_clusters = [job.cluster for job in jobs], [resident.job.cluster for resident in residents]
        joins = join_simply(waiting, waits, clusters, lanes, lane_clusters, terms, settings, compatible)
    placements = []
    for join in sorted(joins, key=lambda join: join.guest):
        job, resident = jobs[join.guest], residents[join.lane]
        if not sites.has_room(resident.gpu, job):  # a neighbour on the same node took it in this very plan
            continue
        sites.take(resident.gpu, job)
        gpu = snapshot.gpus[resident.gpu]
        run_s = float(running.done_s[join.lane] + running.left_s[join.lane])
        lost_s = float(running.lost_s[join.lane]) + join.delay_s
        d = float(waiting.expected_s[join.guest])
        reasons = Reasons(
            wait_s=float(waits[join.guest]),
            guest_isd_pct=(join.stay_s / d - 1.0) * 100.0 if d > 0 else None,
            resident_isd_pct=lost_s / run_s * 100.0 if 0 < run_s < np.inf else None,
            resident_budget_pct=promise_pct(resident.job, settings),
            shared_s=min(join.stay_s, float(running.left_s[join.lane]) + join.delay_s),
            gain_s=join.gain_s,
            explored=join.explored,
        )
        how = How.SUCCEEDS if to_succeed else How.BESIDE if gpu.occupants else How.TOGETHER
        placements.append(Placement(job.job_id, gpu.node, gpu.index, how, resident.job.job_id, reasons))
    return placements


def _why(job: PendingJob, longest_s: float, wait_s: float, settings: PolicySettings) -> str:
    """One line for the user whose job waits for a whole GPU."""
    if job.max_isd_pct == 0:
        return "waits for a whole GPU: its owner wants it unshared"
    if settings.policy == "gpushare" and (s := expected_s(job, settings.limit_use)) > longest_s:
        return f"waits for a whole GPU: too long ({s:.0f} s) for a second half, where {longest_s:.0f} s are the most"
    return f"waits for a whole GPU, expected in {wait_s:.0f} s: no resident now that it could join and finish sooner"
