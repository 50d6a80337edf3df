"""Waiting jobs and open lanes of a snapshot, as the arrays that rules and steps look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.helper.durations import Ahead, given_done, longest_guest_s, mean_duration_s
from slurm_gpushare.helper.places import Lane, SiteFit, Sites, shared_places
from slurm_gpushare.helper.rules import NOBODY, VERDICT_S, Lanes, PairCosts, PairRates, Scene, Waiting
from slurm_gpushare.helper.second_halves import Join
from slurm_gpushare.helper.snapshot import How, Occupant, PendingJob, Placement, Reasons, Snapshot
from slurm_gpushare.knowledge.rates import Bools, Floats, Ints, Knowledge, KnowledgeByModel, known_on
from slurm_gpushare.protocol.policy import PolicySettings

Ranked = tuple[int, PendingJob]
BLOCK_KINDS = 64
"""Tokens whose costs are worked out at once; a site with more of them is planned in several blocks.

With 2,000 tokens on 2,500 cards the guests' gain is 0.2 % less than with blocks of 512, in a third of the time."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What all of one plan goes by."""

    snapshot: Snapshot
    knowledge: Knowledge | KnowledgeByModel
    settings: PolicySettings
    sites: Sites


@dataclass(frozen=True, slots=True)
class Asked:
    """Jobs that may join somebody, with their places in the queue, and lanes of one width on one GPU model."""

    width: int
    guests: Sequence[Ranked]
    lanes: Sequence[Lane]
    wanted: Ints  # by GPU, place in the queue of the first job that needs it whole
    next_owner: Ints  # by GPU, place in the queue of the job that shares with nobody and gets it next
    waits_s: Mapping[int, float]  # for a whole place, by place in the queue


class SiteHalves:
    """The second halves of a snapshot, while they are handed out (`second_halves.Halves`)."""

    def __init__(self, view: PlanInput, asked: Asked) -> None:
        self.view, self.asked = view, asked
        self.knowledge = known_on(view.knowledge, view.snapshot.gpus[asked.lanes[0].gpu].rates_of)
        self.short_s = longest_guest_s(mean_duration_s(view.snapshot, asked.width), view.settings)
        self.all_lanes = len(asked.lanes)
        self.placements: list[Placement] = []
        self.on_trial = _on_trial(view.snapshot, asked.width)
        self._waits, self._free = np.ones(len(asked.guests), bool), np.ones(len(asked.lanes), bool)

    def open(self) -> tuple[Ints, Ints]:
        return np.flatnonzero(self._waits), np.flatnonzero(self._free)

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        """All at once, or, where tokens are many, dealt by token: no table grows with the square of the site."""
        rows, columns = self.open()
        kinds, kind = _numbered([job.workload.token for _, job in self.asked.guests])
        blocks = max(1, -(-len(kinds) // BLOCK_KINDS))
        for block in range(blocks):
            if len(columns[block::blocks]):
                yield rows[kind % blocks == block], columns[block::blocks]

    def expected_s(self, rows: Ints) -> Floats:
        return np.array([self.asked.guests[row][1].workload.expected_s for row in rows.tolist()], float)

    def left_s(self, columns: Ints) -> Floats:
        return self._running([self.asked.lanes[column].resident for column in columns.tolist()]).ahead.left.middle_s

    def held_s(self) -> Floats:
        pairs = [gpu.occupants[:2] for gpu in shared_places(self.view.snapshot.gpus, self.asked.width)]
        left_s, other_left_s = (self._running([pair[i] for pair in pairs]).ahead.left.middle_s for i in (0, 1))
        return np.minimum(left_s, other_left_s)

    def scene(self, rows: Ints, columns: Ints) -> Scene:
        guests = [self.asked.guests[row] for row in rows.tolist()]
        lanes = [self.asked.lanes[column] for column in columns.tolist()]
        fit = SiteFit(self.view.sites, self.view.settings, [job for _, job in guests], lanes)
        there = self._running([lane.resident for lane in lanes])
        guest_tokens, guest_kind = _numbered([job.workload.token for _, job in guests])
        lane_tokens, lane_kind = _numbered([lane.resident.workload.token for lane in lanes])
        waits_s = np.array([self.asked.waits_s[rank] for rank, _ in guests], float)
        return Scene(
            waiting=_waiting(guests, guest_kind, self.view.snapshot.now_s),
            lanes=_lanes(there, lanes, lane_kind, self.asked, fit.gpus, self.view.settings),
            costs=_terms(guest_tokens, lane_tokens, self.knowledge, self.view),
            settings=self.view.settings,
            short_s=self.short_s,
            waits_s=lambda some: waits_s[some],
            on_trial=(self._tried(guest_tokens), self._tried(lane_tokens)),
            head_rank=self._head_rank(),
            fit=fit,
        )

    def join(self, rows: Ints, columns: Ints, joins: list[Join]) -> None:
        """Book it in queue order; a neighbour on the same node may have taken the room in this very plan."""
        for join in sorted(joins):
            row, column = int(rows[join.guest]), int(columns[join.lane])
            (rank, job), lane = self.asked.guests[row], self.asked.lanes[column]
            sites, tokens = self.view.sites, {job.workload.token, lane.resident.workload.token}
            if not (sites.has_room(lane.gpu, job) and sites.limits.allows(job, lane.resident)):
                continue
            if join.explored and tokens & self.on_trial:
                continue
            self.on_trial |= tokens if join.explored else set()
            sites.take(lane.gpu, job, lane.resident)
            self._waits[row] = self._free[column] = False
            gpu = self.view.snapshot.gpus[lane.gpu]
            how = How.SUCCEEDS if join.succeeds else How.BESIDE if gpu.occupants else How.TOGETHER
            place = self.view.sites.place(lane.gpu, self.asked.width)
            reasons = self._reasons(join, job, lane.resident, self.asked.waits_s[rank])
            self.placements.append(Placement(job.key, place, how, lane.resident.key, reasons))

    def _tried(self, tokens: Sequence[str]) -> Bools:
        return np.array([token in self.on_trial for token in tokens], bool)

    def _head_rank(self) -> int:
        rank, job = self.asked.guests[int(np.argmax(self._waits))]
        waited_s = self.view.snapshot.now_s - job.eligible_s
        return rank if waited_s >= job.workload.expected_s else NOBODY

    def _running(self, jobs: Sequence[Occupant]) -> Running:
        return running(jobs, self.view.snapshot.now_s, self.view.settings)

    def _reasons(self, join: Join, job: PendingJob, resident: Occupant, wait_s: float) -> Reasons:
        """What is expected of a guest and its resident."""
        there = self._running([resident])
        left_s = float(there.ahead.left.middle_s[0])
        run_s = float(there.ahead.done_s[0]) + left_s
        lost_s = float(there.lost_s[0]) + join.delay_s
        own_pct = resident.workload.max_isd_pct
        return Reasons(
            wait_s=wait_s,
            guest_isd_pct=(join.stay_s / join.d - 1.0) * 100.0 if join.d > 0 else None,
            resident_isd_pct=lost_s / run_s * 100.0 if 0 < run_s < np.inf else None,
            resident_budget_pct=self.view.settings.promises.of(guest=resident.joined, own_pct=own_pct),
            shared_s=min(join.stay_s, left_s + join.delay_s),
            gain_s=join.gain_s,
            explored=join.explored,
        )


def _on_trial(snapshot: Snapshot, width: int) -> set[str | None]:
    """The workloads of pairs that have begun so lately that their nodes have not told yet how fast they run, or could
    not: after `VERDICT_S` nobody waits for that."""
    found: set[str | None] = set()
    for gpu in shared_places(snapshot.gpus, width):
        pair = gpu.occupants[:2]
        lately = any(job.start_s is None or snapshot.now_s - job.start_s < VERDICT_S for job in pair)
        if lately and not all(job.judged for job in pair):
            found |= {job.workload.token for job in pair}
    return found


def _numbered(tokens: Iterable[str | None]) -> tuple[list[str], Ints]:
    """The different tokens, and for each of `tokens` its number among them: jobs of one token share their rates."""
    names = [token or "" for token in tokens]
    at = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(at), np.array([at[name] for name in names], np.int64)


@dataclass(frozen=True, slots=True)
class Running:
    """Where running jobs stand, by column."""

    ahead: Ahead
    lost_s: Floats
    limit_left_s: Floats


def running(jobs: Sequence[Occupant], now_s: float, settings: PolicySettings) -> Running:
    def column(values: Iterable[float]) -> Floats:
        return np.fromiter(values, float, len(jobs))

    elapsed = column(0.0 if job.start_s is None else max(now_s - job.start_s - job.paused_s, 0.0) for job in jobs)
    lost = np.minimum(column(job.lost_s for job in jobs), elapsed)
    limit, given = column(job.workload.limit_s for job in jobs), column(job.given_s for job in jobs)
    limit_left = limit - elapsed
    if settings.extend_time_limit:
        limit_left = limit_left + np.maximum(lost - given, 0.0)
    middle, spread = (column(getattr(job.workload, name) for job in jobs) for name in ("expected_s", "expected_spread"))
    return Running(Ahead.of(middle, spread, limit - given, elapsed - lost), lost, limit_left)


def _waiting(guests: Sequence[Ranked], kind: Ints, now_s: float) -> Waiting:
    jobs = [job.workload for _, job in guests]
    own = [np.inf if job.max_isd_pct is None else job.max_isd_pct for job in jobs]
    middle, spread, limit_s = (
        np.array([getattr(job, name) for job in jobs], float) for name in ("expected_s", "expected_spread", "limit_s")
    )
    duration = given_done(middle, spread, limit_s, np.zeros(len(jobs)))
    return Waiting(
        rank=np.array([rank for rank, _ in guests], np.int64),
        kind=kind,
        low_s=duration.low_s,
        expected_s=duration.middle_s,
        high_s=duration.high_s,
        limit_s=limit_s,
        waited_s=now_s - np.array([job.eligible_s for _, job in guests], float),
        own_pct=np.array(own, float),
    )


def _lanes(
    there: Running, lanes: Sequence[Lane], kind: Ints, asked: Asked, gpus: Ints, settings: PolicySettings
) -> Lanes:
    jobs, wanted_rank = [lane.resident for lane in lanes], asked.wanted[gpus]
    promise = [settings.promises.of(guest=job.joined, own_pct=job.workload.max_isd_pct) for job in jobs]
    ahead, promised = there.ahead, np.array(promise, float)
    return Lanes.of(
        kind, ahead, promised, there.lost_s, there.limit_left_s, wanted_rank, wanted_rank, asked.next_owner[gpus]
    )


def _terms(guests: Sequence[str], residents: Sequence[str], knowledge: Knowledge, view: PlanInput) -> PairCosts:
    forward, backward = knowledge.rates(guests, residents), knowledge.rates(residents, guests)
    can_share = np.ones(forward.mean.shape, bool)
    if view.snapshot.never_together:
        column = {token: j for j, token in enumerate(residents)}
        row = {token: i for i, token in enumerate(guests)}
        for one, other in view.snapshot.never_together:
            for guest, resident in ((one, other), (other, one)):
                if guest in row and resident in column:
                    can_share[row[guest], column[resident]] = False
    return PairCosts(PairRates.of(forward, backward, can_share), view.settings)
