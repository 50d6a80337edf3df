"""Our own policy in the simulator: the helper's plan, fed from the simulated cluster's arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_gpushare.helper.durations import Ahead, longest_guest_s
from slurm_gpushare.helper.pair_speeds import FULL_WEIGHT_S, VERDICT_WEIGHT
from slurm_gpushare.helper.places import expected_waits_s
from slurm_gpushare.helper.rules import NOBODY as NO_RANK
from slurm_gpushare.helper.rules import VERDICT_S, Lanes, PairCosts, PairRates, Scene, Waiting, take
from slurm_gpushare.helper.second_halves import Join, steps
from slurm_gpushare.knowledge.interference import Interference, Telemetry
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.rates import UNIT_SD, Floats, Ints, RateTable
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.known_durations import Durations
from slurm_gpushare.whatif.simulate import Policy, start_whole
from slurm_gpushare.whatif.stops import Stops
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.world import NOBODY, SAME_INSTANT_S, World

LOOKS = ((VERDICT_S, VERDICT_WEIGHT), (FULL_WEIGHT_S, 1.0 - VERDICT_WEIGHT))
"""After how long a pairing is learned from, and with what weight, as by the helper; a shorter one when it ends."""
MOST_REFITTED = 2000
"""Up to so many pairings seen, all is solved anew each time that their number has doubled; then it changes little."""
REFRESH = 0.01
"""The costs follow the observations each time that these have grown by so much: early ones at once."""


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

    def start(self, pairs: MeasuredPairs) -> RateTable | LearnedKnowledge:
        """What is known before the first job: of profiles without telemetry, the mean of all."""
        if self.knowledge == "oracle":
            rate = np.where(np.isfinite(pairs.rate), pairs.rate, 1.0)
            return RateTable(rate, rate)
        knowledge = LearnedKnowledge(self.general or default_kb().interference)
        if self.telemetry is not None and self.knowledge != "cold":
            knowledge.profiled(pairs.profiles, self.telemetry)
        return knowledge


class BelievedRates:
    """Rates between all profiles, as they are believed to be now.

    They are a table that stays, or knowledge, refined by noisy observations of the pairings of this run if it `learns`.
    """

    def __init__(
        self, work: SimulatedJobs, settings: PolicySettings, start: RateTable | LearnedKnowledge, learns: bool = False
    ) -> None:
        self._names = work.pairs.profiles
        self._can_share = np.isfinite(work.pairs.rate)
        self._settings = settings
        self._start = start
        self._solved = 0
        self._random = np.random.default_rng([work.seed, 2])
        self._learns = learns
        self._seen = self._used = self._ended = 0
        self._begun = [0] * len(LOOKS)
        self._terms: PairCosts | None = None

    def costs(self) -> PairCosts:
        if self._terms is None or self._seen - self._used > REFRESH * self._used:
            self._used, table = self._seen, self._start
            if isinstance(table, LearnedKnowledge):
                if 2 * self._solved < self._seen <= MOST_REFITTED:
                    self._solved = self._seen
                    table.refit()
                table = table.rates(self._names, self._names)
            self._terms = PairCosts(PairRates.of(table, table, self._can_share), self._settings)
        return self._terms

    def saw(self, world: World) -> None:
        """Learn from the pairings that were watched for long enough, or ended, since the last call."""
        if not (self._learns and isinstance(self._start, LearnedKnowledge)):
            return
        begun, ended = world.pairings_begun, world.pairings_ended
        for at, (watched_s, weight) in enumerate(LOOKS):
            while (
                self._begun[at] < len(begun) and begun[self._begun[at]][2] + watched_s <= world.now_s + SAME_INSTANT_S
            ):
                a, b, since_s = begun[self._begun[at]]
                self._begun[at] += 1
                if not np.fmin(world.end_s[a], world.end_s[b]) < since_s + watched_s:
                    self._observe(self._start, world, a, b, weight)
        for a, b, seconds in ended[self._ended :]:
            weight = min(1.0, max(0.05, seconds / FULL_WEIGHT_S)) - sum(
                w for watched_s, w in LOOKS if seconds >= watched_s
            )
            if weight > 0.0:
                self._observe(self._start, world, a, b, weight)
        self._ended = len(ended)

    def _observe(self, knowledge: LearnedKnowledge, world: World, job_a: int, job_b: int, weight: float) -> None:
        a, b = int(world.work.profile[job_a]), int(world.work.profile[job_b])
        for victim, neighbour in ((a, b), (b, a)):
            off = UNIT_SD / weight**0.5 * self._random.standard_normal()
            rate = float(np.clip(world.rate_of[victim, neighbour] * (1.0 + off), 0.02, 1.0))
            knowledge.observe(self._names[victim], self._names[neighbour], rate, weight)
        self._seen += 1


@dataclass(frozen=True, slots=True)
class Places:
    """Places of one width: jobs with room beside them, and those that share already (by job index)."""

    residents: Ints
    first: Ints
    second: Ints
    wanted: int  # place in the queue of the first job that needs these cards whole
    join: Callable[[int, int], None]


def _first(places: Ints, nobody: int) -> int:
    return int(places[0]) if len(places) else nobody


class SimulatedHalves:
    """The second halves of the simulated cluster, while they are handed out (`second_halves.Halves`)."""

    def __init__(self, policy: Gpushare, world: World, queue: Ints, rows: Ints, places: Places) -> None:
        self.policy, self.world, self.queue, self.ranks, self.places = policy, world, queue, rows, places
        self.jobs = queue[rows]
        self.short_s = longest_guest_s(policy.mean_s(bool(policy.wide[self.jobs[0]])), policy.settings)
        self.all_lanes = len(places.residents)
        self._held_s = np.minimum(policy.left_s(world, places.first), policy.left_s(world, places.second))
        self._free = np.ones(self.all_lanes, bool)
        self._waiting = self._rows_of(self.jobs)
        self._lanes = self._lanes_of(places.residents)

    def open(self) -> tuple[Ints, Ints]:
        return np.flatnonzero(self.world.waiting[self.jobs]), np.flatnonzero(self._free)

    def blocks(self) -> Iterable[tuple[Ints, Ints]]:
        return [self.open()]

    def expected_s(self, rows: Ints) -> Floats:
        return self._waiting.expected_s[rows]

    def left_s(self, columns: Ints) -> Floats:
        return self._lanes.left_s[columns]

    def held_s(self) -> Floats:
        return self._held_s

    def scene(self, rows: Ints, columns: Ints) -> Scene:
        return Scene(
            waiting=take(self._waiting, rows),
            lanes=take(self._lanes, columns),
            costs=self.policy.seen.costs(),
            settings=self.policy.settings,
            short_s=self.short_s,
            waits_s=lambda some: self._waits_s(self.ranks[rows[some]]),
            on_trial=(self.policy.on_trial, self.policy.on_trial),
            head_rank=self._head_rank(),
        )

    def join(self, rows: Ints, columns: Ints, joins: list[Join]) -> None:
        for join in joins:
            job, lane = int(self.jobs[rows[join.guest]]), int(columns[join.lane])
            kinds = self.world.work.profile[[job, self.places.residents[lane]]]
            if join.explored and self.policy.on_trial[kinds].any():
                continue
            self.policy.on_trial[kinds] |= join.explored
            self._free[lane] = False
            self.policy.successor[job] |= join.succeeds
            self.places.join(job, int(self.places.residents[lane]))

    def _head_rank(self) -> int:
        first = int(np.argmax(self.world.waiting[self.jobs]))
        waited_s = self.world.now_s - self.world.work.submit_s[self.jobs[first]]
        return int(self.ranks[first]) if waited_s >= self._waiting.expected_s[first] else NO_RANK

    def _waits_s(self, ranks: Ints) -> Floats:
        work, durations = self.world.work, self.policy.durations
        free_in_s = self.policy.left_s(self.world, self.world.first[self.world.first >= 0])
        ahead = self.queue[: ranks.max() + 1]
        return expected_waits_s(free_in_s, durations.expected_s[ahead] * work.num_gpus[ahead])[ranks]

    def _rows_of(self, jobs: Ints) -> Waiting:
        durations, work = self.policy.durations, self.world.work
        return Waiting(
            rank=self.ranks,
            kind=work.profile[jobs],
            low_s=durations.before.low_s[jobs],
            expected_s=durations.expected_s[jobs],
            high_s=durations.before.high_s[jobs],
            limit_s=durations.limit_s[jobs],
            waited_s=self.world.now_s - work.submit_s[jobs],
            own_pct=np.full(len(jobs), np.inf),
        )

    def _lanes_of(self, residents: Ints) -> Lanes:
        world, policy = self.world, self.policy
        done_s = world.work.duration_s[residents] - world.left_s(residents)
        lost_s = world.now_s - world.start_s[residents] - world.stood_s(residents) - done_s
        promise = policy.promise_pct(world, residents)
        limit_left_s = policy.durations.limit_s[residents] - done_s
        wanted_rank = np.full(len(residents), self.places.wanted)
        kind = world.work.profile[residents]
        return Lanes.of(kind, policy.ahead(world, residents), promise, lost_s, limit_left_s, wanted_rank)


class Gpushare(Policy):
    """Whole GPUs in queue order; second halves by the express-lane rules."""

    def __init__(self, work: SimulatedJobs, seed: int = 0, options: Options | None = None) -> None:
        super().__init__(work, seed)
        self.options = options or Options()
        self.settings = self.options.settings
        self.durations = Durations(work, self.options.durations)
        self.seen = BelievedRates(
            work, self.settings, self.options.start(work.pairs), self.options.knowledge == "learned"
        )
        self._arrived = self._told = 0
        self._ended = np.zeros(work.jobs, bool)
        self._came = np.zeros(2)  # jobs that do not want a node, and that do
        self._sum_expected_s = np.zeros(2)
        self.on_trial = np.zeros(len(work.pairs.profiles), bool)
        self.stops = Stops()
        self.successor = np.zeros(work.jobs, bool)  # came beside somebody, under a resident's promise
        self._by_expected: Ints | None = None
        self.wide = (work.num_gpus == work.gpus_per_node) & (work.gpus_per_node > 1) & self.options.share_gangs

    def schedule(self, world: World) -> None:
        self._take_note(world)
        self.stops.look(world, self)
        self.place(world)

    def place(self, world: World) -> None:
        """Start whom the plan would start."""
        self.on_trial[:] = False
        for *pair, _ in self._begun_lately(world):
            self.on_trial[world.work.profile[pair]] = True
        if self.settings.objective == "saving" and world.waiting.any():
            self._fill(world, before_whole=True)
        start_whole(world, self._order())
        if world.waiting.any():
            self._fill(world)

    def _begun_lately(self, world: World) -> list[tuple[int, int, float]]:
        """The pairings of which a verdict is near, the oldest first."""
        begun = world.pairings_begun
        while self._told < len(begun) and begun[self._told][2] + VERDICT_S <= world.now_s + SAME_INSTANT_S:
            self._told += 1
        return begun[self._told :]

    def wake_s(self, world: World) -> float:
        lately = self._begun_lately(world) if world.waiting.any() else []
        return min(lately[0][2] + VERDICT_S if lately else np.inf, self.stops.wake_s)

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
                some = new[self.wide[new] == bool(wide)]
                self._came[wide] += len(some)
                self._sum_expected_s[wide] += self.durations.expected_s[some].sum()
            self._arrived = arrived

    def _fill(self, world: World, before_whole: bool = False) -> None:
        """Fill second halves, of single cards and then of places of several."""
        queue = self._queue(world)
        several = world.work.num_gpus[queue] > 1
        both = np.flatnonzero((world.second != NOBODY) & ~world.whole)
        cards = world.halves()
        needs_whole = _first(np.flatnonzero(several), len(queue))
        places = Places(world.first[cards], world.first[both], world.second[both], needs_whole, world.join)
        self._share(world, queue, np.flatnonzero(~several), places, before_whole)
        if self.wide.any():
            wide = self.wide[queue] & world.waiting[queue]
            pairs = [(a, b) for a, b in world.gang_pairs() if self.wide[a]]
            first, second = np.array(pairs, np.int64).reshape(-1, 2).T
            needs_whole = _first(np.flatnonzero(several & ~self.wide[queue]), len(queue))
            places = Places(world.lone_gangs(), first, second, needs_whole, world.join_gang)
            self._share(world, queue, np.flatnonzero(wide), places, before_whole)

    def _share(self, world: World, queue: Ints, rows: Ints, places: Places, before_whole: bool) -> None:
        """Let jobs of the queue (by place in it) join those that have room beside them, of one width."""
        if len(places.residents) and len(rows):
            halves = SimulatedHalves(self, world, queue, rows, places)
            for step in steps(self.settings, before_whole):
                step(halves)

    def mean_s(self, wide: bool) -> float:
        """Mean expected duration of the jobs that came so far: of gangs, or of the others."""
        return float(self._sum_expected_s[int(wide)] / max(1, self._came[int(wide)]))

    def ahead(self, world: World, jobs: Ints) -> Ahead:
        return self.durations.ahead(jobs, world.work.duration_s[jobs] - world.left_s(jobs))

    def promise_pct(self, world: World, jobs: Ints) -> Floats:
        """What each may be slowed by."""
        promises, guest = self.settings.promises, world.guest[jobs] & ~self.successor[jobs]
        return np.where(guest, promises.of(guest=True, own_pct=None), promises.of(guest=False, own_pct=None))

    def left_s(self, world: World, jobs: Ints) -> Floats:
        return self.ahead(world, jobs).left.middle_s


def oracle(work: SimulatedJobs, seed: int = 0, options: Options | None = None) -> Gpushare:
    """The best we know of with true rates and durations: shortest first for whole GPUs too, and wider promises."""
    settings = replace(
        (options or Options()).settings, objective="completion", resident_budget_pct=50.0, guest_cap_pct=100.0
    )
    return Gpushare(work, seed, Options("oracle", "known", "sjf", settings))
