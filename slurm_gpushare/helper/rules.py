"""The rules of sharing: which waiting job may join which job, each a named mask over pairs of the two.

A *lane* is a place with one sharer and room beside it. All is arrays, so that the helper (thousands of jobs a tick)
and the simulator (a decision an event) run the same code. Jobs of one *kind* (token) share their rates, so what can be
said about a pair of kinds is worked out once (`PairCosts`), not per job. docs/scheduling.md has the rules and formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.helper.durations import Ahead
from slurm_gpushare.helper.explain import Code
from slurm_gpushare.helper.places import SiteFit
from slurm_gpushare.knowledge.rates import Bools, Floats, Ints, RateTable
from slurm_gpushare.protocol.policy import PolicySettings

UNKNOWN_SPREAD = 1.4
"""Mean over pessimistic rate from which a prediction is little more than a guess."""
VERDICT_S = 20.0
"""So long after a pair has begun its nodes have told at the latest how fast both run, at default settings."""
HELD_UP_S = 1.0
"""Who shares with nobody may have a card so much later because its resident was slowed."""
NOBODY = int(np.iinfo(np.int64).max)
"""A place in the queue behind everybody."""


@dataclass(frozen=True, slots=True)
class PairRates:
    """Rates of guests of each kind (row) and of residents of each kind (column) beside each other."""

    guest_mean: Floats
    guest_low: Floats
    resident_mean: Floats
    resident_low: Floats
    can_share: Bools

    @classmethod
    def of(cls, guests: RateTable, residents: RateTable, can_share: Bools) -> PairRates:
        """From rates of guests beside residents, and of residents beside guests."""
        return cls(guests.mean, guests.low, residents.mean.T, residents.low.T, can_share)


class PairCosts:
    """What it costs if a guest of each kind (row) joins a resident of each kind (column), and whether it may."""

    def __init__(self, rates: PairRates, settings: PolicySettings) -> None:
        slowest = 1.0 / (1.0 + settings.guest_cap_pct / 100.0)
        # The optimistic end, as far above the mean as the pessimistic is below; half as far once something is known,
        # so that pairs which are probably too slow are not tried again and again.
        spread = rates.guest_mean / rates.guest_low
        guest_high = np.minimum(rates.guest_mean * spread ** np.where(spread > UNKNOWN_SPREAD, 1.0, 0.5), 1.0)
        surely, perhaps = rates.guest_low >= slowest, guest_high >= slowest
        self.explored: Bools = perhaps & ~surely & rates.can_share
        """A trial: the guest's rate may keep its promise, and may not."""
        # A guest of duration d stays d / r_guest, and the resident loses (1 - r_resident) of that.
        promised = rates.guest_low / np.maximum(1.0 - rates.resident_low, 1e-9)
        self.longest: Floats = np.where((surely | perhaps) & rates.can_share, promised, 0.0)
        """Longest guest that leaves before the resident, per second of the resident's budget."""
        self.to_the_end: Floats = np.where(self.longest > 0.0, 1.0 / rates.resident_low - 1.0, np.inf)
        """Delay of the resident if the guest stays until it ends, per second that it has left: at worst."""
        self.can_share: Bools = rates.can_share
        self.resident_mean: Floats = rates.resident_mean
        self.resident_low: Floats = rates.resident_low
        self.stay: Floats = 1.0 / rates.guest_mean
        """Time on the card, per second of the guest's duration; `stay_high` is the pessimistic one."""
        self.stay_high: Floats = 1.0 / rates.guest_low
        self.delay: Floats = self.stay * (1.0 - rates.resident_mean)
        """Delay of the resident, per second of the guest's duration."""
        self.delay_high: Floats = self.stay_high * (1.0 - rates.resident_low)
        extended = rates.guest_mean / rates.resident_mean
        self.outlives: Floats = extended if settings.extend_time_limit else np.ones_like(extended)
        """Longest time limit of a guest that does not outlast the resident's, per second that is left of the latter."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Pending jobs that may join somebody, by row, in priority order."""

    rank: Ints  # place in the whole queue, other people's jobs included
    kind: Ints  # row of the costs
    low_s: Floats  # duration alone, if it is short
    expected_s: Floats  # the middle: what gains are counted with
    high_s: Floats  # if it is long
    limit_s: Floats
    waited_s: Floats
    own_pct: Floats  # most that owners let them be slowed, inf where one said nothing


@dataclass(frozen=True, slots=True)
class Lanes:
    """Residents with room beside them, by column."""

    kind: Ints  # column of the costs
    budget_s: Floats  # delay that it may still suffer, if its run is short
    expected_budget_s: Floats  # the same, if its run is as long as expected
    bears: Floats  # delay that it may suffer for each second left, if somebody stays until it ends
    left_s: Floats  # alone-time that it is expected to need still: the middle
    left_high_s: Floats  # if its run is long
    limit_left_s: Floats
    wanted_rank: Ints  # place in the queue of the first job that needs this card whole
    wanted_whole: Ints | None = None  # the same, where it is another's and not kept for a sharer; None: not looked at
    next_rank: Ints | None = None  # of the job that shares with nobody and gets this card next; None: not looked at

    @classmethod
    def of(
        cls, kind: Ints, ahead: Ahead, promise_pct: Floats, lost_s: Floats, limit_left_s: Floats, wanted_rank: Ints,
        wanted_whole: Ints | None = None, next_rank: Ints | None = None,
    ) -> Lanes:  # fmt: skip
        """From what residents have before them, were promised and have lost."""
        return cls(
            kind, ahead.budget_s(promise_pct, lost_s), ahead.expected_budget_s(promise_pct, lost_s),
            ahead.bears(promise_pct, lost_s), ahead.left.middle_s, ahead.left.high_s, limit_left_s, wanted_rank,
            wanted_whole, next_rank,
        )  # fmt: skip


Columns = TypeVar("Columns", Waiting, Lanes)


def take(columns: Columns, some: Ints) -> Columns:
    """Only these jobs."""
    values = ((field.name, getattr(columns, field.name)) for field in fields(columns))
    return replace(columns, **{name: value[some] for name, value in values if value is not None})


@dataclass(frozen=True, slots=True)
class Scene:
    """Some waiting jobs, some lanes, and all that the rules look at."""

    waiting: Waiting
    lanes: Lanes
    costs: PairCosts
    settings: PolicySettings
    short_s: float  # jobs of at most this are short
    waits_s: Callable[[Ints], Floats]  # how long these can expect to wait for a whole place; asked only where it counts
    on_trial: tuple[Bools, Bools]  # the kinds of guests, and of residents, of which a verdict is near
    head_rank: int = NOBODY  # of the first that waits, once it has waited for as long as it runs
    fit: SiteFit | None = None  # None: cards are all alike, and everybody fits

    def reserved(self) -> Scene:
        """Keep the card that is free first for the head of the queue, once it has waited for as long as it runs.

        As backfill does: nobody behind it may hold that card on. Otherwise guests that outlast residents and have
        guests themselves could keep every card from a long job. On a small site one card is much; until then the head
        is as well served by the first second half that suits it.
        """
        wanted_rank = self.lanes.wanted_rank.copy()
        first = int(np.argmin(self.lanes.left_s))
        wanted_rank[first] = min(wanted_rank[first], self.head_rank)
        return replace(self, lanes=replace(self.lanes, wanted_rank=wanted_rank))


class Offers:
    """What it would be like if some of the waiting (rows) joined some of the lanes (columns)."""

    def __init__(self, scene: Scene, rows: Ints, columns: Ints, wait_s: Floats) -> None:
        waiting, lanes = scene.waiting, scene.lanes
        self.scene, self.rows, self.columns, self.wait_s = scene, rows, columns, wait_s
        self.cell = np.ix_(waiting.kind[rows], lanes.kind[columns])
        self.d = waiting.expected_s[rows][:, None]
        self.high_s = waiting.high_s[rows][:, None]
        self.left_s = lanes.left_s[columns]
        self.stay_s, self.delay_s = _together(self.d, self.left_s, scene.costs, self.cell)
        self.sooner_s: Floats = wait_s[:, None] + self.d - self.stay_s - self.delay_s
        """By how much both together are done sooner than if the guest waits."""
        self.gain_s = self.sooner_s
        if scene.settings.objective == "saving":
            with np.errstate(invalid="ignore"):  # a resident without an end
                self.gain_s = self.d + self.left_s - np.maximum(self.stay_s, self.left_s + self.delay_s)

    def of(self, table: NDArray[Any]) -> NDArray[Any]:
        """What a table by kind says of these pairs."""
        return table[self.cell]

    def allowed(self, rules: tuple[Rule, ...]) -> Bools:
        """Where no rule says no. The last are asked first: they cost least, and leave little to ask the others."""
        ok = np.ones((len(self.rows), len(self.columns)), bool)
        for rule in reversed(rules):
            if not ok.any():
                break
            ok = ok & rule.mask(self)
        return ok

    def at_worst(self) -> tuple[Floats, Floats]:
        """How long those who are there share at worst until they end, and what it costs who came last."""
        shared_s = self.scene.lanes.left_high_s[self.columns] / self.of(self.scene.costs.resident_low)
        return shared_s, shared_s * (1.0 - 1.0 / self.of(self.scene.costs.stay_high))


def _together(d: Floats, left_s: Floats, costs: PairCosts, cell: tuple[Ints, ...]) -> tuple[Floats, Floats]:
    """How long guests of duration `d` stay, and how much they delay residents that have `left_s` to go.

    The one that ends later goes on alone, at full speed.
    """
    stay, delay = d * costs.stay[cell], d * costs.delay[cell]
    to_the_end = left_s * (1.0 / costs.resident_mean[cell] - 1.0)
    shared = left_s + to_the_end
    with np.errstate(invalid="ignore"):  # a resident without an end: inf - inf, which nobody looks at
        stays = np.where(stay <= shared, stay, shared + d - shared / costs.stay[cell])
    return stays, np.minimum(delay, to_the_end)


# The rules themselves. Masks are by row and column, or by one of them where the other does not matter.


class Rule(NamedTuple):
    """Whom it keeps apart (mask: False), under which name, and in what numbers a job that waits for it is told so."""

    code: Code
    mask: Callable[[Offers], Bools]
    need: Callable[[Offers], Floats] | None = None
    """What each job needs."""
    have: Callable[[Offers], Floats] | None = None
    """What each lane offers of it."""


def _of_site(ask: Callable[[SiteFit, Offers], NDArray[Any]]) -> Callable[[Offers], NDArray[Any]]:
    """About nodes, cards and owners: where cards are all alike, everybody fits."""
    return lambda offers: _EVERYBODY if (fit := offers.scene.fit) is None else ask(fit, offers)


def _promised(offers: Offers) -> Bools:
    """The resident's promise holds at worst: the guest leaves in time, or may stay until the resident ends.

    In a trial that is measured within seconds and can be stopped, the rates are at their worst, and durations as
    expected: it is not to be feared that all goes wrong at once.
    """
    costs, lanes = offers.scene.costs, offers.scene.lanes
    longest, to_the_end = offers.of(costs.longest), offers.of(costs.to_the_end)
    kept: Bools = offers.high_s <= longest * lanes.budget_s[offers.columns]
    kept = kept | (to_the_end <= lanes.bears[offers.columns])
    if offers.scene.settings.stops and (trial := offers.of(costs.explored)).any():
        budget_s = lanes.expected_budget_s[offers.columns]
        with np.errstate(invalid="ignore"):  # a resident without an end
            kept = kept | (trial & ((offers.d <= longest * budget_s) | (to_the_end * offers.left_s <= budget_s)))
    return kept


def _worth_a_trial(offers: Offers) -> Bools:
    """Where little is known: the guest cannot lose much by a trial, and there is one at a time for a workload.

    Either its promise holds at the worst rates over its whole run, since the resident leaves it in time. Or it is done
    sooner than by waiting even so. The verdict comes within seconds, and may spare the next ones such a stay.
    """
    scene, (guests, residents) = offers.scene, offers.scene.on_trial
    costs, waiting, lanes = scene.costs, scene.waiting, scene.lanes
    trial = offers.of(costs.explored)
    if not trial.any():
        return _EVERYBODY
    d, run_s, left_s = offers.d, offers.d, offers.left_s
    if not scene.settings.stops:
        d, run_s = offers.high_s, waiting.low_s[offers.rows][:, None]
        left_s = lanes.left_high_s[offers.columns]
    stay = offers.of(costs.stay_high)
    lost_s = left_s / offers.of(costs.resident_low) * (1.0 - 1.0 / stay)
    kept = lost_s <= scene.settings.guest_cap_pct / 100.0 * run_s
    kept |= d * (stay + offers.of(costs.delay_high)) < offers.wait_s[:, None] + offers.d
    on_trial = guests[waiting.kind[offers.rows]][:, None] | residents[lanes.kind[offers.columns]]
    allowed: Bools = ~trial | (kept & ~on_trial)
    return allowed


def _outlives_s(offers: Offers) -> Floats:
    return offers.of(offers.scene.costs.outlives) * offers.scene.lanes.limit_left_s[offers.columns]


def _first_in_queue(offers: Offers) -> Bools:
    return offers.scene.waiting.rank[offers.rows][:, None] <= offers.scene.lanes.wanted_rank[offers.columns]


def _nobody_held_up(offers: Offers) -> Bools:
    """It does not outlast the resident, by their limits, where somebody before it needs the card whole; nor at worst
    the time that the resident is expected to need, where that is somebody who does not share. Nor does it slow the
    resident where that one is to have this very card."""
    leaves = offers.scene.waiting.limit_s[offers.rows][:, None] <= _outlives_s(offers)
    if (whole := offers.scene.lanes.wanted_whole) is not None:
        before = whole[offers.columns] < offers.scene.waiting.rank[offers.rows][:, None]
        stay_s = offers.high_s * offers.of(offers.scene.costs.stay_high)
        leaves &= ~before | (stay_s <= offers.left_s)
    if (next_rank := offers.scene.lanes.next_rank) is not None:
        before = next_rank[offers.columns] < offers.scene.waiting.rank[offers.rows][:, None]
        leaves &= ~before | (offers.delay_s <= HELD_UP_S)
    return leaves | _first_in_queue(offers)


def _in_time(offers: Offers, lost_s: Floats, resident_lost_s: Floats) -> Bools:
    """Whether what each loses at worst can be given back, or fits its time limit as it is."""
    scene, rows, columns = offers.scene, offers.rows, offers.columns
    if scene.fit is None:
        return _EVERYBODY
    margin = 1.0 - scene.settings.limit_margin_pct / 100.0
    limit_s, limit_left_s = scene.waiting.limit_s[rows][:, None], scene.lanes.limit_left_s[columns]
    grows, resident_grows = scene.fit.may_grow_s(rows, columns, limit_s, limit_left_s)
    ok: Bools = (lost_s <= grows) | (offers.high_s + lost_s <= margin * limit_s)
    left_s = scene.lanes.left_high_s[columns]
    return ok & ((resident_lost_s <= resident_grows) | (left_s + resident_lost_s <= margin * limit_left_s))


def _within_limits(offers: Offers) -> Bools:
    """Neither dies at its time limit if the rates are at their worst and both run for long."""
    costs, left_s = offers.scene.costs, offers.scene.lanes.left_high_s[offers.columns]
    with np.errstate(invalid="ignore"):
        to_the_end = left_s * (1.0 / offers.of(costs.resident_low) - 1.0)
        resident_lost_s = np.fmin(offers.high_s * offers.of(costs.delay_high), to_the_end)
    return _in_time(offers, offers.high_s * (offers.of(costs.stay_high) - 1.0), resident_lost_s)


def _worst_pct(offers: Offers) -> Floats:
    return (offers.of(offers.scene.costs.stay_high) - 1.0) * 100.0


def _own_cap(offers: Offers) -> Bools:
    """An owner's own cap holds at worst, and knows no exploration."""
    own_pct = offers.scene.waiting.own_pct[offers.rows][:, None]
    return (own_pct >= offers.scene.settings.guest_cap_pct) | (_worst_pct(offers) <= own_pct)


_EVERYBODY: Bools = np.ones((1, 1), bool)
NEVER_TOGETHER = Rule(Code.FORBIDDEN, lambda offers: offers.of(offers.scene.costs.can_share))

RULES: tuple[Rule, ...] = (
    Rule(Code.PLACE, _of_site(lambda fit, offers: fit.room(offers.rows, offers.columns))),
    Rule(Code.PREEMPTION, _of_site(lambda fit, offers: fit.staying(offers.columns)[None, :])),
    Rule(Code.LIMIT, _of_site(lambda fit, offers: fit.limits(offers.rows, offers.columns))),
    Rule(Code.OWNERS, _of_site(lambda fit, offers: fit.owners(offers.rows, offers.columns))),
    Rule(Code.MPS_USER, _of_site(lambda fit, offers: fit.served(offers.rows, offers.columns))),
    Rule(
        Code.MEMORY,
        _of_site(lambda fit, offers: fit.need_mib(offers.rows)[:, None] <= fit.free_mib(offers.columns)),
        _of_site(lambda fit, offers: fit.need_mib(offers.rows)),
        _of_site(lambda fit, offers: np.maximum(fit.free_mib(offers.columns), 0.0)),
    ),
    NEVER_TOGETHER,
    Rule(
        Code.TOO_LONG,
        lambda offers: offers.d <= offers.scene.short_s,
        lambda offers: offers.d[:, 0],
        lambda offers: np.full(1, offers.scene.short_s),
    ),
    Rule(Code.PROMISE, _promised),
    Rule(Code.EXPLORATION, _worth_a_trial),
    Rule(  # nothing is tried where nobody would see how it goes
        Code.NOT_MEASURABLE,
        _of_site(lambda fit, offers: ~offers.of(offers.scene.costs.explored) | fit.measurable(offers.columns)),
    ),
    Rule(
        Code.PRIORITY,
        _nobody_held_up,
        lambda offers: offers.scene.waiting.limit_s[offers.rows],
        lambda offers: np.maximum(_outlives_s(offers), 0.0),
    ),
    Rule(Code.TIME_LIMIT, _within_limits),
    Rule(  # a higher cap helps only where the site's own rules say yes
        Code.OWN_CAP, _own_cap, lambda offers: offers.scene.waiting.own_pct[offers.rows], _worst_pct
    ),
    Rule(Code.NO_GAIN, lambda offers: offers.gain_s > 0.0),
)
"""What must hold of a guest and its resident, in the order in which a job that waits is told."""

LONG_GUEST_RULES = tuple(rule for rule in RULES if rule.code is not Code.TOO_LONG)
_SITES_OWN = (Code.PLACE, Code.PREEMPTION, Code.LIMIT, Code.OWNERS, Code.MPS_USER, Code.MEMORY)
HARD_RULES = tuple(rule for rule in RULES if rule.code in (*_SITES_OWN, Code.TIME_LIMIT))
"""What the policies without promises keep to."""


# A successor has the card after who is there: its promise is about its whole run, and that one counts as its guest.


def _successor_promised(offers: Offers) -> Bools:
    waiting = offers.scene.waiting
    pct = np.minimum(offers.scene.settings.promises.resident_pct, waiting.own_pct[offers.rows])
    _, lost_s = offers.at_worst()
    return lost_s <= (pct / 100.0 * waiting.low_s[offers.rows])[:, None]


def _bears_successor(offers: Offers) -> Bools:
    return 1.0 / offers.of(offers.scene.costs.resident_low) - 1.0 <= offers.scene.lanes.bears[offers.columns]


def _ends_last(offers: Offers) -> Bools:
    """Else it is an ordinary guest."""
    costs = offers.scene.costs
    last: Bools = offers.d * offers.of(costs.stay) >= offers.left_s / offers.of(costs.resident_mean)
    return last


def _successor_within_limits(offers: Offers) -> Bools:
    shared_s, lost_s = offers.at_worst()
    return _in_time(offers, lost_s, shared_s - offers.scene.lanes.left_high_s[offers.columns])


SUCCESSOR_RULES: tuple[Rule, ...] = (
    *(rule for rule in RULES if rule.code in _SITES_OWN),
    Rule(Code.TIME_LIMIT, _successor_within_limits),
    NEVER_TOGETHER,
    Rule(Code.PROMISE, _successor_promised),
    Rule(Code.PROMISE, _bears_successor),
    Rule(Code.NO_PARTNER, _ends_last),
    Rule(Code.PRIORITY, _first_in_queue),
    Rule(Code.NO_GAIN, lambda offers: offers.sooner_s > 0.0),  # whatever the objective: it saves no card time by itself
)
