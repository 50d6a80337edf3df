"""Our own policy in the simulator: the helper's plan, fed from the simulated cluster's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from slurm_gpushare.helper.durations import Ahead, longest_guest_s
from slurm_gpushare.helper.guests import Candidates, PairRates, Residents, Terms, choose_guests
from slurm_gpushare.helper.long_guests import Backlog, choose_long_guests, first_long
from slurm_gpushare.helper.succession import AT_ONCE, ending_first, succeed
from slurm_gpushare.helper.whole_gpus import expected_waits_s
from slurm_gpushare.knowledge.interference import Interference, Telemetry
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.rates import UNIT_SD
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.card_allocation import start_whole
from slurm_gpushare.whatif.jobs import Floats, Ints, SimulatedJobs
from slurm_gpushare.whatif.known_durations import Durations
from slurm_gpushare.whatif.simulate import Policy
from slurm_gpushare.whatif.world import NOBODY, World

OBSERVATION_NOISE = UNIT_SD  # so that observations count with weight 1
FULL_WEIGHT_S = 120.0
"""A pairing that has lasted so long is learned from at once, a shorter one when it ends: as the helper does."""
MOST_REFITTED = 2000
"""Up to so many pairings seen, all is solved anew each time that their number has doubled; then it changes little."""
REFRESH = 0.01
"""The terms follow the observations each time that these have grown by so much: early ones at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """How our policy is run."""

    knowledge: str = "learned"  # cold, telemetry, learned or oracle
    durations: str = "known"  # known, limit, history or none
    order: str = "priority"  # of whole GPUs: priority or sjf
    settings: PolicySettings = field(default_factory=PolicySettings)
    general: Interference | None = None  # the knowledge base to start from; default: the shipped one
    telemetry: Telemetry | None = None  # of the profiles, in their order, where knowledge starts from it
    share_gangs: bool = False  # whether two jobs as wide as a node share it

    def start(self, profiles: Sequence[str]) -> LearnedKnowledge:
        """What is known before the first job: of profiles without telemetry, the mean of all."""
        knowledge = LearnedKnowledge(self.general or default_kb().interference)
        if self.telemetry is not None and self.knowledge != "cold":
            knowledge.profiled(profiles, self.telemetry)
        return knowledge


class BelievedRates(Protocol):
    """Rates between all profiles, as they are believed to be now."""

    def terms(self) -> Terms: ...

    def saw(self, world: World) -> None:
        """Learn from the pairings that were watched for long enough, or ended, since the last call."""


class TrueRates:
    """The measured rates themselves."""

    def __init__(self, work: SimulatedJobs, settings: PolicySettings) -> None:
        can_share = np.isfinite(work.pairs.rate)
        rate = np.where(can_share, work.pairs.rate, 1.0)
        self._terms = Terms(PairRates(rate, rate, rate.T, rate.T, can_share), settings)

    def terms(self) -> Terms:
        return self._terms

    def saw(self, world: World) -> None:
        pass


class LearnedRates:
    """Knowledge as it starts, refined by noisy observations of the pairings seen in this run where it `learns`."""

    def __init__(
        self, work: SimulatedJobs, settings: PolicySettings, learns: bool, knowledge: LearnedKnowledge
    ) -> None:
        self._names = work.pairs.profiles
        self._can_share = np.isfinite(work.pairs.rate)
        self._settings = settings
        self._knowledge = knowledge
        self._solved = 0
        self._random = np.random.default_rng([work.seed, 2])
        self._learns = learns
        self._seen = self._used = self._begun = self._ended = 0
        self._terms: Terms | None = None

    def terms(self) -> Terms:
        if self._terms is None or self._seen - self._used > REFRESH * self._used:
            self._used = self._seen
            if 2 * self._solved < self._seen <= MOST_REFITTED:
                self._solved = self._seen
                self._knowledge.refit()
            table = self._knowledge.rates(self._names, self._names)
            self._terms = Terms(
                PairRates(table.mean, table.low, table.mean.T, table.low.T, self._can_share), self._settings
            )
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


@dataclass(frozen=True, slots=True)
class Halves:
    """Jobs with room beside them on their card or node, and those that share already (by job index)."""

    residents: Ints
    first: Ints
    second: Ints
    wanted: int  # place in the queue of the first job that needs these cards whole


def _first(places: Ints, nobody: int) -> int:
    return int(places[0]) if len(places) else nobody


class Gpushare(Policy):
    """Whole GPUs in queue order; second halves by the express-lane rules."""

    def __init__(self, work: SimulatedJobs, seed: int = 0, options: Options | None = None) -> None:
        super().__init__(work, seed)
        self.options = options or Options()
        self.settings = self.options.settings
        self.durations = Durations(work, self.options.durations)
        oracle = self.options.knowledge == "oracle"
        learns, start = self.options.knowledge == "learned", self.options.start
        self.seen: BelievedRates = (
            TrueRates(work, self.settings)
            if oracle
            else LearnedRates(work, self.settings, learns, start(work.pairs.profiles))
        )
        self._arrived = 0
        self._ended = np.zeros(work.jobs, bool)
        self._came = np.zeros(2)  # jobs that do not want a node, and that do
        self._sum_expected_s = np.zeros(2)
        self.successor = np.zeros(work.jobs, bool)  # came beside somebody, under a resident's promise
        self._by_expected: Ints | None = None
        self._wide = (work.num_gpus == work.gpus_per_node) & (work.gpus_per_node > 1) & self.options.share_gangs

    def schedule(self, world: World) -> None:
        self._take_note(world)
        if self.settings.objective == "saving" and world.waiting.any():
            self._fill(world, before_whole=True)
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
        if self.options.durations in ("history", "none"):
            for job in np.flatnonzero(np.isfinite(world.end_s) & ~self._ended).tolist():
                self._ended[job] = True
                self.durations.ended(job, bool(world.shared[job]))
                self._by_expected = None
        arrived = int(np.searchsorted(world.work.submit_s, world.now_s, side="right"))
        if arrived > self._arrived:
            new = np.arange(self._arrived, arrived)
            for wide in (0, 1):
                some = new[self._wide[new] == bool(wide)]
                self._came[wide] += len(some)
                self._sum_expected_s[wide] += self.durations.expected_s[some].sum()
            self._arrived = arrived

    def _fill(self, world: World, before_whole: bool = False) -> None:
        """Fill second halves; then, unless it is `before_whole` cards are handed out, by the long and by successors."""
        queue = self._queue(world)
        need = world.work.num_gpus[queue]
        several = np.flatnonzero(need > 1)
        cards = world.halves()
        both = np.flatnonzero((world.second != NOBODY) & ~world.whole)
        single = np.arange(len(queue)) if len(several) == 0 else np.flatnonzero(need == 1)
        halves = Halves(world.first[cards], world.first[both], world.second[both], _first(several, len(queue)))
        self._share(world, queue, single, halves, world.join, before_whole)
        if self._wide.any():
            wide = np.flatnonzero(self._wide[queue] & world.waiting[queue])
            pairs = [(a, b) for a, b in world.gang_pairs() if self._wide[a]]
            first, second = np.array(pairs, np.int64).reshape(-1, 2).T
            others = _first(several[~self._wide[queue[several]]], len(queue))
            halves = Halves(world.lone_gangs(), first, second, others)
            self._share(world, queue, wide, halves, world.join_gang, before_whole)

    def _share(
        self,
        world: World,
        queue: Ints,
        single: Ints,
        halves: Halves,
        join_: Callable[[int, int], None],
        before_whole: bool,
    ) -> None:
        """Let jobs of the queue (by place in it) join those that have room beside them, of one kind of either."""
        work, durations, residents = world.work, self.durations, halves.residents
        if len(residents) == 0 or len(single) == 0:
            return
        guests = queue[single]
        waiting = Candidates(
            rank=single,
            kind=work.profile[guests],
            low_s=durations.before.low_s[guests],
            expected_s=durations.expected_s[guests],
            high_s=durations.before.high_s[guests],
            limit_s=durations.limit_s[guests],
            waited_s=world.now_s - work.submit_s[guests],
        )

        def waits_s(some: Ints) -> Floats:
            free_in_s = self._left_s(world, world.first[world.first >= 0])
            ahead = queue[: single[some].max() + 1]
            return expected_waits_s(free_in_s, durations.expected_s[ahead] * work.num_gpus[ahead])[single[some]]

        lanes, terms = self._lanes(world, halves), self.seen.terms()
        longest_s = longest_guest_s(self._mean_s(bool(self._wide[guests[0]])), self.settings)
        left_s, other_left_s = self._left_s(world, halves.first), self._left_s(world, halves.second)
        held_s, cards = np.minimum(left_s, other_left_s), len(residents) + len(halves.first)
        open_ = np.ones(len(residents), bool)

        def start(job: int, lane: int) -> None:
            open_[lane] = False
            join_(job, int(residents[lane]))

        for join in choose_guests(waiting, lanes, terms, self.settings, longest_s, waits_s):
            start(int(guests[join.guest]), join.lane)
        if before_whole:
            return
        still, free = np.flatnonzero(world.waiting[guests]), np.flatnonzero(open_)
        long = still[first_long(waiting.expected_s[still], longest_s)]
        if len(long) and len(free):
            short = int((waiting.expected_s[still] <= longest_s).sum())
            backlog = Backlog(longest_s, short, int(waiting.rank[still[0]]), cards, held_s)
            some, open_lanes = waiting.take(long), lanes.take(free)
            for join in choose_long_guests(some, open_lanes, terms, self.settings, backlog, waits_s(long)):
                start(int(guests[long[join.guest]]), int(free[join.lane]))
        heads, free = np.flatnonzero(world.waiting[guests])[:AT_ONCE], np.flatnonzero(open_)
        if len(heads) == 0 or len(free) == 0:
            return
        ending = free[ending_first(lanes.left_s[free])]
        for join in succeed(waiting.take(heads), lanes.take(ending), terms, self.settings, longest_s, waits_s(heads)):
            job = int(guests[heads[join.guest]])
            self.successor[job] = True
            start(job, int(ending[join.lane]))

    def _mean_s(self, wide: bool) -> float:
        """Mean expected duration of the jobs that came so far: of gangs, or of the others."""
        return float(self._sum_expected_s[int(wide)] / max(1, self._came[int(wide)]))

    def _lanes(self, world: World, halves: Halves) -> Residents:
        residents = halves.residents
        done_s = world.work.duration_s[residents] - world.left_s(residents)
        lost_s = world.now_s - world.start_s[residents] - done_s
        ahead = self._ahead(world, residents)
        promise = self._promise_pct(world, residents)
        return Residents(
            kind=world.work.profile[residents],
            budget_s=ahead.budget_s(promise, lost_s),
            bears=ahead.bears(promise, lost_s),
            left_s=ahead.left.middle_s,
            left_high_s=ahead.left.high_s,
            limit_left_s=self.durations.limit_s[residents] - done_s,
            wanted_rank=np.full(len(residents), halves.wanted),
        )

    def _promise_pct(self, world: World, jobs: Ints) -> Floats:
        promises, guest = self.settings.promises, world.guest[jobs] & ~self.successor[jobs]
        return np.where(guest, promises.of(guest=True, own_pct=None), promises.of(guest=False, own_pct=None))

    def _ahead(self, world: World, jobs: Ints) -> Ahead:
        return self.durations.ahead(jobs, world.work.duration_s[jobs] - world.left_s(jobs))

    def _left_s(self, world: World, jobs: Ints) -> Floats:
        return self._ahead(world, jobs).left.middle_s


def oracle(work: SimulatedJobs, seed: int = 0, options: Options | None = None) -> Gpushare:
    """The best we know of with true rates and durations: shortest first for whole GPUs too, and wider promises."""
    settings = replace(
        (options or Options()).settings, objective="completion", resident_budget_pct=50.0, guest_cap_pct=100.0
    )
    return Gpushare(work, seed, Options("oracle", "known", "sjf", settings))
