"""Places: where a job may be at all, who gets empty cards, whose second half is open, and how long a whole one takes.

Empty cards go in priority order, everybody's, since other people's jobs get theirs first where they rank higher.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from slurm_gpushare.helper.gpu_limits import LimitLedger
from slurm_gpushare.helper.snapshot import Gpu, GpuPlace, NodeRoom, Occupant, PendingJob, Snapshot
from slurm_gpushare.knowledge.rates import Bools, Floats, Ints
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.record import Mps


def hand_out(sites: Sites, empty: Ints, queue: Iterable[tuple[int, PendingJob]]) -> dict[int, int]:
    """Which job (by place in the queue) gets which empty GPU, or gets that one first of several.

    Jobs without a token are among them, since Slurm will start them there or elsewhere before ours that rank lower.
    Room only shrinks on the way, so what was too small for a demand once is not looked at for it again.
    """
    free = np.zeros(len(sites.gpus), bool)
    free[empty] = True
    looked: dict[object, int] = {}
    granted: dict[int, int] = {}
    left = len(empty)
    for rank, job in queue:
        if left == 0:
            break
        if not sites.limits.allows(job, None):
            continue
        shape = (sites.demand(job), job.cpus, job.node_mem_mib, job.workload.limit_s, job.gpus, job.workload.width)
        start = looked.get(shape, 0)
        if start == len(empty):
            continue
        allowed = sites.allowed(job)
        found: list[int] = []
        at = start
        if job.workload.width > 1:
            found = _all_of_a_node(sites, free & allowed, job)
        while job.workload.width <= 1 and at < len(empty) and len(found) < job.gpus:
            gpu = int(empty[at])
            at += 1
            if free[gpu] and allowed[gpu] and (job.gpus > 1 or sites.has_room(gpu, job)):
                found.append(gpu)
        looked[shape] = at if len(found) == job.gpus else len(empty)
        if len(found) < job.gpus:
            continue
        free[found] = False
        left -= len(found)
        sites.take(found[0], job)
        granted[rank] = found[0]
    return granted


def _all_of_a_node(sites: Sites, free: Bools, job: PendingJob) -> list[int]:
    """The cards of the first node that is entirely free for a job as wide as it; empty if there is none."""
    taken = np.bincount(sites.node, weights=~free, minlength=len(sites.nodes))
    for node in np.flatnonzero(taken == 0).tolist():
        cards = np.flatnonzero(sites.node == node)
        if len(cards) == job.gpus and sites.has_room(int(cards[0]), job):
            return [int(card) for card in cards]
    return []


# Where a job may run at all: partition, features, nodes, reservation, CPUs and memory.


Demand = tuple[object, ...]


def admits(node: NodeRoom, job: PendingJob) -> bool:
    """Whether Slurm would let `job` onto `node`, its free CPUs and memory aside."""
    return (
        node.usable
        and (not job.partitions or bool(node.partitions & job.partitions))
        and job.features <= node.features
        and (job.nodes_wanted is None or node.name in job.nodes_wanted)
        and node.name not in job.nodes_excluded
        and (node.reservation == job.reservation if node.reservation or job.reservation else True)
    )


class Sites:
    """The GPUs of a snapshot with their nodes' room, as arrays; `take` books what a placement uses."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.gpus: tuple[Gpu, ...] = snapshot.gpus
        self.nodes = [snapshot.nodes[name] for name in dict.fromkeys(gpu.node for gpu in snapshot.gpus)]
        at = {node.name: i for i, node in enumerate(self.nodes)}
        self.node: Ints = np.array([at[gpu.node] for gpu in self.gpus], np.int64)
        self.index: Ints = np.array([gpu.index for gpu in self.gpus], np.int64)
        self.model = np.array([gpu.model for gpu in self.gpus], object)
        self.usable: Bools = np.array([gpu.usable for gpu in self.gpus], bool)
        self.cpus = np.array([node.cpus_free for node in self.nodes], np.int64)
        self.mem_mib = np.array([node.mem_free_mib for node in self.nodes], np.int64)
        self.reserved_in_s: Floats = np.array([node.reserved_from_s - snapshot.now_s for node in self.nodes], float)
        self.limited, self.limits = bool(snapshot.limits), LimitLedger(snapshot.limits)
        self._admitting: dict[Demand, Bools] = {}

    def demand(self, job: PendingJob) -> Demand:
        """What decides `admits`: equal for most jobs of a site, so that it is worked out once for all of them."""
        where = (job.partitions, job.features, job.nodes_wanted, job.nodes_excluded, job.reservation)
        return (*where, job.gpu_index, job.gpu_model)

    def cards(self, gpu: int, width: int) -> list[int]:
        """The cards of the place of this width that begins with `gpu`, by number in the snapshot."""
        return [gpu] if width <= 1 else [int(card) for card in np.flatnonzero(self.node == self.node[gpu])]

    def place(self, gpu: int, width: int) -> GpuPlace:
        """The same by node and index."""
        return GpuPlace(self.gpus[gpu].node, tuple(self.gpus[card].index for card in self.cards(gpu, width)))

    def allowed(self, job: PendingJob) -> Bools:
        """The GPUs that `job` may have, on nodes that admit it."""
        demand = self.demand(job)
        if demand not in self._admitting:
            admitting = np.array([admits(node, job) for node in self.nodes], bool)
            allowed = self.usable & admitting[self.node]
            if job.gpu_index is not None:
                allowed &= self.index == job.gpu_index
            if job.gpu_model is not None:
                allowed &= self.model == job.gpu_model
            self._admitting[demand] = allowed
        return self._admitting[demand]

    def has_room(self, gpu: int, job: PendingJob) -> bool:
        """Whether the node of `gpu` has CPUs and memory for `job` now, and no reservation during its time limit."""
        node = self.node[gpu]
        room = self.cpus[node] >= job.cpus and self.mem_mib[node] >= job.node_mem_mib
        return bool(room and job.workload.limit_s <= self.reserved_in_s[node])

    def room_for(self, jobs: list[PendingJob], gpus: Ints) -> Bools:
        """`has_room` for jobs (rows) on GPUs (columns), with what `admits` says."""
        node = self.node[gpus]
        cpus, mem_mib, limit_s = (
            np.array(values, float)[:, None]
            for values in zip(*((job.cpus, job.node_mem_mib, job.workload.limit_s) for job in jobs), strict=True)
        )
        room = (self.cpus[node] >= cpus) & (self.mem_mib[node] >= mem_mib) & (limit_s <= self.reserved_in_s[node])
        allowed = np.stack([self.allowed(job)[gpus] for job in jobs])
        return room & allowed

    def take(self, gpu: int, job: PendingJob, beside: Occupant | None = None) -> None:
        """Book CPUs, memory, and what it counts for limits."""
        self.limits.take(job, beside)
        self.cpus[self.node[gpu]] -= job.cpus
        self.mem_mib[self.node[gpu]] -= job.node_mem_mib


def first_wanting(sites: Sites, pending: Iterable[tuple[int, PendingJob]], width: int = 1) -> Ints:
    """For each GPU the place in the queue of the first job that could use it, and needs it whole.

    One that shares a single card is content with half of one. A wider one is content with half of a place as wide (this
    is about places of `width` cards), but needs other cards whole. Both only on GPU models that they know.
    """
    nobody = np.iinfo(np.int64).max
    first: Ints = np.full(len(sites.gpus), nobody, np.int64)
    seen: set[Demand] = set()
    for rank, job in pending:
        shares = job.shares and job.workload.width in (1, width)
        if shares and job.measured is None:
            continue
        shared_on = tuple(job.measured or ()) if shares else ()
        demand = (*sites.demand(job), shared_on)
        if demand not in seen:
            seen.add(demand)
            whole = sites.allowed(job) & ~np.isin(sites.model, shared_on)
            first = np.where(whole, np.minimum(first, rank), first)
    return first


MOST_NEXT = 32
"""So many jobs at the head of the queue are looked at: cards for those behind them are not known so far ahead."""


def next_owners(sites: Sites, pending: Iterable[tuple[int, PendingJob]], free_in_s: Floats) -> Ints:
    """For each GPU the place in the queue of the job that shares with nobody and is expected to get it next.

    Of a job for every fourth card at most: who is further back is served by all that sharing saves.
    """
    found: Ints = np.full(len(sites.gpus), np.iinfo(np.int64).max, np.int64)
    free_in_s, most = free_in_s.copy(), min(MOST_NEXT, max(1, len(found) // 4))
    for rank, job in islice((item for item in pending if not item[1].shares), most):
        may = np.flatnonzero(sites.allowed(job) & np.isfinite(free_in_s))
        of_node: dict[str, list[int]] = defaultdict(list)
        for gpu in may[np.argsort(free_in_s[may], kind="stable")].tolist():
            cards = of_node[sites.gpus[gpu].node]
            cards.append(gpu)
            if len(cards) == job.gpus:
                found[cards], free_in_s[cards] = rank, np.inf
                break
    return found


@dataclass(frozen=True, slots=True)
class Lane:
    """The second half of a place: its first card (by number in the snapshot), and the sharer that has the other."""

    gpu: int
    resident: Occupant


def open_lanes(gpus: Sequence[Gpu], width: int) -> list[Lane]:
    """Sharers that have all of a place of `width` cards to themselves, with room beside them, in GPU order."""
    found: dict[tuple[str, str], list[int]] = {}
    for at, gpu in enumerate(gpus):
        if gpu.has_room and gpu.occupants[0].workload.width == width:
            found.setdefault((gpu.node, gpu.occupants[0].key), []).append(at)
    return [Lane(cards[0], gpus[cards[0]].occupants[0]) for cards in found.values() if len(cards) == width]


def shared_places(gpus: Sequence[Gpu], width: int) -> list[Gpu]:
    """The first cards of places of `width` cards that two jobs share."""
    found: dict[tuple[str, str], Gpu] = {}
    for gpu in gpus:
        if gpu.usable and len(gpu.occupants) > 1 and gpu.occupants[0].workload.width == width:
            found.setdefault((gpu.node, gpu.occupants[0].key), gpu)
    return list(found.values())


class SiteFit:
    """What nodes, cards and owners allow, of waiting jobs (rows) on lanes (columns)."""

    def __init__(
        self, sites: Sites, settings: PolicySettings, jobs: Sequence[PendingJob], lanes: Sequence[Lane]
    ) -> None:
        self.sites, self.settings, self.jobs, self.lanes = sites, settings, jobs, lanes
        self.residents = [lane.resident.workload for lane in lanes]
        self.gpus = np.array([lane.gpu for lane in lanes], np.int64)
        cards = [sites.gpus[lane.gpu] for lane in lanes]
        self._one_user = np.array([card.mps is Mps.ONE_USER or settings.mps == "user" for card in cards], bool)
        self._blind = np.array([card.blind for card in cards], bool)
        self.clusters = [job.workload.cluster for job in self.jobs], [resident.cluster for resident in self.residents]
        keep = 1.0 - self.settings.memory_headroom_pct / 100.0
        total_mib = [card.mem_total_mib for card in cards]
        self._free_mib = np.array(  # a job without a profile might need anything
            [
                total * keep - resident.mem_used_mib if resident.mem_used_mib is not None else -1.0
                for total, resident in zip(total_mib, self.residents, strict=True)
            ],
            float,
        )

    def may_use(self, rows: Ints, columns: Ints) -> Bools:
        """Whose cards they could have whole."""
        return np.stack([self.sites.allowed(self.jobs[i])[self.gpus[columns]] for i in rows.tolist()])

    def room(self, rows: Ints, columns: Ints) -> Bools:
        """Where they may be, and where CPUs and memory of the node are free for them."""
        return self.sites.room_for([self.jobs[i] for i in rows.tolist()], self.gpus[columns])

    def staying(self, columns: Ints) -> Bools:
        """Lanes that are not being vacated for a job that may preempt."""
        return np.array([not self.sites.gpus[gpu].vacating for gpu in self.gpus[columns].tolist()], bool)

    def limits(self, rows: Ints, columns: Ints) -> Bools:
        """Whether limits of users, accounts and QOS on GPUs leave them a place there."""
        if not self.sites.limited:
            return np.ones((1, 1), bool)
        allows, lanes = self.sites.limits.allows, [self.lanes[j].resident for j in columns.tolist()]
        return np.array([[allows(self.jobs[i], resident) for resident in lanes] for i in rows.tolist()], bool)

    def owners(self, rows: Ints, columns: Ints) -> Bools:
        """Whether the site lets the two owners share."""
        who = self.settings.share_across
        return np.ones((1, 1), bool) if who == "any" else self._same(who, rows, columns)

    def _same(self, who: str, rows: Ints, columns: Ints) -> Bools:
        ours = np.array([getattr(self.jobs[i].workload, who) for i in rows.tolist()], object)
        theirs = np.array([getattr(self.residents[j], who) for j in columns.tolist()], object)
        same: Bools = ours[:, None] == theirs
        return same

    def served(self, rows: Ints, columns: Ints) -> Bools:
        """Whether an MPS server that is there would take the second job too."""
        one_user = self._one_user[columns]
        return ~one_user | self._same("user", rows, columns) if one_user.any() else np.ones((1, 1), bool)

    def measurable(self, columns: Ints) -> Bools:
        """Where the card tells what each of two jobs does."""
        return ~self._blind[columns]

    def need_mib(self, rows: Ints) -> Floats:
        jobs = [self.jobs[i].workload for i in rows.tolist()]
        return np.array([np.inf if job.mem_used_mib is None else job.mem_used_mib for job in jobs], float)

    def free_mib(self, columns: Ints) -> Floats:
        """GPU memory beside the resident; negative where nobody knows what that one needs."""
        return self._free_mib[columns]

    def may_grow_s(self, rows: Ints, columns: Ints, limit_s: Floats, limit_left_s: Floats) -> tuple[Floats, Floats]:
        """By how much the time limits of waiting jobs and of residents may grow at most."""
        if not self.settings.extend_time_limit:
            return np.zeros((1, 1)), np.zeros(1)
        reserved_in_s = self.sites.reserved_in_s[self.sites.node[self.gpus[columns]]]
        may_grow_s = np.array([self.jobs[i].workload.may_grow_s for i in rows.tolist()], float)
        resident_may_s = np.array([self.residents[j].may_grow_s for j in columns.tolist()], float)
        with np.errstate(invalid="ignore"):  # neither a limit nor a reservation: inf - inf
            return np.fmin(may_grow_s[:, None], reserved_in_s - limit_s), np.fmin(
                resident_may_s, reserved_in_s - limit_left_s
            )


# How long a pending job can expect to wait for a whole GPU.


FOREVER_S = 1e9  # a job without a time limit; a number, since infinity cannot be reckoned with


def expected_waits_s(free_in_s: Floats, work_s: Floats) -> Floats:
    """Expected wait of each pending job, in queue order, if cards go to them one after the other.

    `free_in_s` says in how many seconds each card is free, `work_s` how long each pending job will hold one. The
    queue is taken as a fluid that fills the cards as they come free: job i starts when the capacity freed until then
    equals the work ahead of it, and not before the first card is free.
    """
    if len(free_in_s) == 0:
        return np.full(len(work_s), np.inf)
    free = np.minimum(np.sort(free_in_s), FOREVER_S)
    capacity = np.concatenate([[0.0], np.cumsum(np.diff(free) * np.arange(1, len(free)))])  # freed by each free[i]
    ahead = np.cumsum(work_s) - work_s
    beyond = np.maximum(ahead - capacity[-1], 0.0) / len(free)  # all cards work on the queue from free[-1] on
    waits: Floats = np.interp(ahead, capacity, free) + beyond
    return waits
