"""Our own policy in the simulator: the helper's plan, fed from the simulated cluster's arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from slurm_gpushare.coschedule.expect import budget_s, left_s, longest_guest_s
from slurm_gpushare.coschedule.lanes import Lanes, Rates, Terms, Waiting, fill_lanes
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.coschedule.succession import AT_ONCE, ending_first, succeed
from slurm_gpushare.coschedule.waits import expected_waits_s
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.rates import UNIT_SD
from slurm_gpushare.simulate.durations import Durations
from slurm_gpushare.simulate.exclusive import Policy
from slurm_gpushare.simulate.whole import start_whole
from slurm_gpushare.simulate.workload import Floats, Ints, Workload
from slurm_gpushare.simulate.world import NOBODY, World

OBSERVATION_NOISE = UNIT_SD  # so that observations count with weight 1
FULL_WEIGHT_S = 120.0
"""A pairing that has lasted so long is learned from at once, a shorter one when it ends: as the helper does."""
REFRESH = 0.01
"""The terms follow the observations each time that these have grown by so much: early ones at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """How our policy is run."""

    knowledge: str = "learned"  # cold, learned or oracle
    durations: str = "known"  # known, limit or history
    order: str = "priority"  # of whole GPUs: priority or sjf
    settings: PolicySettings = field(default_factory=lambda: PolicySettings(extend_time_limit=True))


class Seen(Protocol):
    """Rates between all profiles, as they are believed to be now."""

    def terms(self) -> Terms: ...

    def saw(self, world: World) -> None:
        """Learn from the pairings that were watched for long enough, or ended, since the last call."""


class TrueRates:
    """The measured rates themselves."""

    def __init__(self, work: Workload, settings: PolicySettings) -> None:
        can_share = np.isfinite(work.pairs.rate)
        rate = np.where(can_share, work.pairs.rate, 1.0)
        self._terms = Terms(Rates(rate, rate, rate.T, rate.T, can_share), settings)

    def terms(self) -> Terms:
        return self._terms

    def saw(self, world: World) -> None:
        pass


class LearnedRates:
    """The shipped knowledge, refined by noisy observations of the pairings seen in this run (or not: cold)."""

    def __init__(
        self, work: Workload, settings: PolicySettings, learns: bool, knowledge: LearnedKnowledge | None = None
    ) -> None:
        self._names = work.pairs.profiles
        self._can_share = np.isfinite(work.pairs.rate)
        self._settings = settings
        self._knowledge = knowledge or LearnedKnowledge()
        self._view = self._knowledge.view(self._names)
        self._random = np.random.default_rng([work.seed, 2])
        self._learns = learns
        self._seen = self._used = self._begun = self._ended = 0
        self._terms: Terms | None = None

    def terms(self) -> Terms:
        if self._terms is None or self._seen - self._used > REFRESH * self._used:
            self._used = self._seen
            mean, low = self._view.mean, self._view.low
            self._terms = Terms(Rates(mean, low, mean.T, low.T, self._can_share), self._settings)
        return self._terms

    def saw(self, world: World) -> None:
        if not self._learns:
            return
        begun, ended = world.pairings_begun, world.pairings_ended
        while self._begun < len(begun) and begun[self._begun][2] + FULL_WEIGHT_S <= world.now_s:
            a, b, since_s = begun[self._begun]
            self._begun += 1
            if not np.fmin(world.end_s[a], world.end_s[b]) < since_s + FULL_WEIGHT_S:
                self._observe(world, a, b)
        for a, b, seconds in ended[self._ended :]:
            if seconds < FULL_WEIGHT_S:
                self._observe(world, a, b)
        self._ended = len(ended)

    def _observe(self, world: World, job_a: int, job_b: int) -> None:
        a, b = int(world.work.profile[job_a]), int(world.work.profile[job_b])
        for victim, neighbour in ((a, b), (b, a)):
            noisy = world.rate_of[victim, neighbour] * (1 + OBSERVATION_NOISE * self._random.standard_normal())
            self._knowledge.observe(self._names[victim], self._names[neighbour], float(np.clip(noisy, 0.02, 1.0)))
        self._seen += 1


class Gpushare(Policy):
    """Whole GPUs in queue order; second halves by the express-lane rules."""

    def __init__(self, work: Workload, seed: int = 0, options: Options | None = None) -> None:
        super().__init__(work, seed)
        self.options = options or Options()
        self.settings = self.options.settings
        self.durations = Durations(work, self.options.durations, self.settings.limit_use)
        oracle = self.options.knowledge == "oracle"
        learns = self.options.knowledge == "learned"
        self.seen: Seen = TrueRates(work, self.settings) if oracle else LearnedRates(work, self.settings, learns)
        self._arrived = 0
        self._ended = np.zeros(work.jobs, bool)
        self._sum_expected_s = 0.0
        self.heir = np.zeros(work.jobs, bool)  # came beside somebody, under a resident's promise
        self._by_expected: Ints | None = None
        self._all_single = bool((work.num_gpus == 1).all())

    def schedule(self, world: World) -> None:
        self._take_note(world)
        start_whole(world, self._order())
        if world.waiting.any():
            self._fill(world)

    def _order(self) -> Ints:
        if self.options.order == "priority":
            return self.by_submit
        if self._by_expected is None:
            self._by_expected = np.argsort(self.durations.expected_s, kind="stable")
        return self._by_expected

    def _queue(self, world: World) -> Ints:
        """Waiting jobs in the order in which they get whole GPUs."""
        if self.options.order == "priority":
            return np.flatnonzero(world.waiting)
        order = self._order()
        return order[world.waiting[order]]

    def _take_note(self, world: World) -> None:
        """Learn from what ended and arrived since the last look."""
        self.seen.saw(world)
        if self.options.durations == "history":
            for job in np.flatnonzero(np.isfinite(world.end_s) & ~self._ended).tolist():
                self._ended[job] = True
                self.durations.ended(job)
        arrived = int(np.searchsorted(world.work.submit_s, world.now_s, side="right"))
        if arrived > self._arrived:
            new = np.arange(self._arrived, arrived)
            self.durations.arrived(new)
            if self.options.durations == "history":
                self._by_expected = None
            self._sum_expected_s += float(self.durations.expected_s[new].sum())
            self._arrived = arrived

    def _fill(self, world: World) -> None:
        """Fill second halves, and let the head of the queue take over those that end soon."""
        halves = world.halves()
        if len(halves) == 0:
            return
        work, durations = world.work, self.durations
        queue = self._queue(world)
        rank = np.arange(len(queue))
        single = rank if self._all_single else np.flatnonzero(work.num_gpus[queue] == 1)
        guests = queue[single]
        waiting = Waiting(
            rank=single,
            kind=work.profile[guests],
            expected_s=durations.expected_s[guests],
            limit_s=durations.limit_s[guests],
        )

        def waits_s(some: Ints) -> Floats:
            free_in_s = self._left_s(world, world.first[world.first >= 0])
            ahead = queue[: single[some].max() + 1]
            return expected_waits_s(free_in_s, durations.expected_s[ahead] * work.num_gpus[ahead])[single[some]]

        gangs = np.flatnonzero(work.num_gpus[queue] > 1)
        wanted = int(gangs[0]) if len(gangs) else len(queue)
        lanes, terms = self._lanes(world, halves, wanted), self.seen.terms()
        longest_s = longest_guest_s(self._sum_expected_s / self._arrived, self.settings)
        for join in fill_lanes(waiting, lanes, terms, self.settings, longest_s, waits_s):
            world.start(int(guests[join.guest]), int(halves[join.lane]))
        heads = np.flatnonzero(world.waiting[guests])[:AT_ONCE]
        free = np.flatnonzero(world.second[halves] == NOBODY)
        if len(heads) == 0 or len(free) == 0:
            return
        ending = free[ending_first(lanes.left_s[free])]
        for join in succeed(waiting.take(heads), lanes.take(ending), terms, self.settings, longest_s, waits_s(heads)):
            job = int(guests[heads[join.guest]])
            self.heir[job] = True
            world.start(job, int(halves[ending[join.lane]]))

    def _lanes(self, world: World, halves: Ints, wanted: int) -> Lanes:
        residents = world.first[halves]
        durations, settings = self.durations, self.settings
        done_s = world.work.duration_s[residents] - world.left_s(residents)
        lost_s = world.now_s - world.start_s[residents] - done_s
        left = self._left_s(world, residents)
        guest = world.guest[residents] & ~self.heir[residents]
        promise = np.where(guest, settings.guest_cap_pct, settings.resident_budget_pct)
        return Lanes(
            kind=world.work.profile[residents],
            budget_s=budget_s(done_s + left, done_s, lost_s, promise),
            left_s=left,
            limit_left_s=durations.limit_s[residents] - done_s,
            wanted_rank=np.full(len(halves), wanted),
        )

    def _left_s(self, world: World, jobs: Ints) -> Floats:
        d = self.durations
        done_s = world.work.duration_s[jobs] - world.left_s(jobs)
        limit_left_s = d.limit_s[jobs] - done_s
        return left_s(d.expected_s[jobs], d.only_limit[jobs], done_s, limit_left_s, self.settings.limit_use)


def oracle(work: Workload, seed: int = 0, options: Options | None = None) -> Gpushare:
    """The best we know of with true rates and durations: shortest first for whole GPUs too, and wider promises."""
    settings = replace(
        (options or Options()).settings, objective="completion", resident_budget_pct=50.0, guest_cap_pct=100.0
    )
    return Gpushare(work, seed, Options("oracle", "known", "sjf", settings))
