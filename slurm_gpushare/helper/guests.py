"""The express lane: which pending jobs join which residents on the second half of their cards.

This is the heart of the plan, on arrays, so that the helper (thousands of jobs a tick) and the simulator (a decision
an event) run the same code. A *lane* is a card with one sharer and room beside it. Jobs of one *kind* (token) share
their rates, so what can be said about a pair of kinds is worked out once (`Terms`), not per job.
docs/scheduling.md has the rules and formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from slurm_gpushare.protocol.policy import PolicySettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

POD = 64
"""Guests or lanes, whichever are fewer, that are matched exactly at once. More of both are dealt to several pods, which
keeps the plan near-linear."""
HARM = 0.5
"""Weight of a resident's delay against a guest's own time: the budget bounds the one, nothing but this the other."""
UNKNOWN_SPREAD = 1.4
"""Mean over pessimistic rate from which a prediction is little more than a guess."""
ROUNDS = 4
"""How often what the pods left over is dealt again."""


@dataclass(frozen=True, slots=True)
class PairRates:
    """Rates of guests of each kind (row) and of residents of each kind (column) beside each other."""

    guest_mean: Floats
    guest_low: Floats
    resident_mean: Floats
    resident_low: Floats
    can_share: Bools


class Terms:
    """On what terms a guest of each kind (row) may join a resident of each kind (column)."""

    def __init__(self, rates: PairRates, settings: PolicySettings) -> None:
        slowest = 1.0 / (1.0 + settings.guest_cap_pct / 100.0)
        # The optimistic end, as far above the mean as the pessimistic is below; half as far once something is known,
        # so that pairs which are probably too slow are not tried again and again.
        spread = rates.guest_mean / rates.guest_low
        guest_high = np.minimum(rates.guest_mean * spread ** np.where(spread > UNKNOWN_SPREAD, 1.0, 0.5), 1.0)
        # A guest of duration d stays d / r_guest, and the resident loses (1 - r_resident) of that.
        promised = rates.guest_low / np.maximum(1.0 - rates.resident_low, 1e-9)
        # Rates too uncertain to promise anything are tried where even a very bad outcome fits the budget.
        tried = np.minimum(promised, settings.explore_rate / (1.0 - settings.explore_rate))
        surely = rates.guest_low >= slowest
        perhaps = ~surely & (guest_high >= slowest)
        self.explored: Bools = perhaps & rates.can_share
        self.longest: Floats = np.where(rates.can_share, np.where(surely, promised, np.where(perhaps, tried, 0.0)), 0.0)
        """Longest guest that leaves before the resident, per second of the resident's budget."""
        self.to_the_end: Floats = 1.0 / rates.resident_low - 1.0
        """Delay of the resident if the guest stays until it ends, per second that it has left: at worst."""
        if perhaps.any():
            worst = 1.0 / settings.explore_rate - 1.0
            self.to_the_end[perhaps] = np.maximum(self.to_the_end[perhaps], worst)
        self.to_the_end[self.longest <= 0.0] = np.inf
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
class Candidates:
    """Pending jobs that may become guests, by column, in priority order."""

    rank: Ints  # place in the whole queue, other people's jobs included
    kind: Ints  # row of the terms
    low_s: Floats  # duration alone, if it is short
    expected_s: Floats  # the middle: what gains are counted with
    high_s: Floats  # if it is long
    limit_s: Floats
    waited_s: Floats
    own_pct: Floats | None = None  # most that owners let them be slowed, inf where one said nothing; None: none did

    def take(self, some: Ints) -> Candidates:
        """Only these."""
        return Candidates(
            self.rank[some], self.kind[some], self.low_s[some], self.expected_s[some], self.high_s[some],
            self.limit_s[some], self.waited_s[some], None if self.own_pct is None else self.own_pct[some],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Residents:
    """Residents with room beside them, by column."""

    kind: Ints  # column of the terms
    budget_s: Floats  # delay that it may still suffer, if its run is short
    bears: Floats  # delay that it may suffer for each second left, if somebody stays until it ends
    left_s: Floats  # alone-time that it is expected to need still: the middle
    left_high_s: Floats  # if its run is long
    limit_left_s: Floats
    wanted_rank: Ints  # place in the queue of the first job that needs this card whole

    def take(self, some: Ints) -> Residents:
        """Only these."""
        return Residents(
            self.kind[some], self.budget_s[some], self.bears[some], self.left_s[some], self.left_high_s[some],
            self.limit_left_s[some], self.wanted_rank[some],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Offers:
    """What it would be like if guests (rows) joined residents (columns), and where they may."""

    stay_s: Floats
    delay_s: Floats
    gain_s: Floats
    explored: Bools
    ok: Bools

    def join(self, i: int, j: int, guest: int, lane: int) -> Join:
        """The offer in row `i` and column `j`, taken."""
        stay_s, delay_s, gain_s = (float(table[i, j]) for table in (self.stay_s, self.delay_s, self.gain_s))
        return Join(guest, lane, stay_s, delay_s, gain_s, bool(self.explored[i, j]))


@dataclass(frozen=True, slots=True)
class Join:
    """Waiting job `guest` joins lane `lane` (both by position)."""

    guest: int
    lane: int
    stay_s: float
    delay_s: float  # what it costs the resident
    gain_s: float
    explored: bool


Waits = Callable[[Ints], Floats]
"""How long these waiting jobs can expect to wait for a whole card; asked only for those that might share."""
Compatible = Callable[[Ints, Ints], Bools]
"""Which of these waiting jobs (rows) may sit on which of these lanes (columns), apart from `Terms`."""


def choose_guests(
    waiting: Candidates,
    lanes: Residents,
    terms: Terms,
    settings: PolicySettings,
    longest_guest_s: float,
    waits_s: Waits,
    compatible: Compatible | None = None,
) -> list[Join]:
    """Choose guests for the lanes: as many as gain by it, those with the shortest stay first."""
    if len(waiting.kind) == 0 or len(lanes.kind) == 0:
        return []
    lanes = reserve(lanes, int(waiting.rank.min()))
    guests = _candidates(waiting, lanes, terms, longest_guest_s)
    guests = guests[:: -1 if settings.objective == "saving" else 1][: 2 * len(lanes.kind) + 16]
    if len(guests) == 0:
        return []
    wait_s = waits_s(guests)
    free = np.arange(len(lanes.kind))
    joins: list[Join] = []
    for _ in range(ROUNDS):
        pods = -(-min(len(guests), len(free)) // POD)
        now: list[Join] = []
        for pod in range(pods):  # dealt like cards, so that each pod sees a fair sample of jobs and lanes
            mine = slice(pod, None, pods)
            now += _match(waiting, lanes, terms, guests[mine], wait_s[mine], free[mine], settings, compatible)
        joins += now
        if pods == 1 or not now:
            break
        stay = ~np.isin(guests, [join.guest for join in now])
        guests, wait_s = guests[stay], wait_s[stay]
        free = free[~np.isin(free, [join.lane for join in now])]
        if len(guests) == 0 or len(free) == 0:
            break
    return joins


def reserve(lanes: Residents, head_rank: int) -> Residents:
    """Keep the card that is free first for the head of the queue, as backfill does: nobody behind it may hold it on.

    Otherwise guests that outlast residents and have guests themselves could keep every card from a long job.
    """
    wanted_rank = lanes.wanted_rank.copy()
    first = int(np.argmin(lanes.left_s))
    wanted_rank[first] = min(wanted_rank[first], head_rank)
    return replace(lanes, wanted_rank=wanted_rank)


def _candidates(waiting: Candidates, lanes: Residents, terms: Terms, longest_guest_s: float) -> Ints:
    """Jobs that some lane might take, shortest first: a sieve by kind, before anybody is looked at one by one."""
    budget_s = np.full(terms.longest.shape[1], -1.0)
    np.maximum.at(budget_s, lanes.kind, lanes.budget_s)
    limit_left_s = np.full(terms.longest.shape[1], -1.0)
    np.maximum.at(limit_left_s, lanes.kind, lanes.limit_left_s)
    bears = np.full(terms.longest.shape[1], -1.0)  # delay per second left that some resident of this kind can bear
    np.maximum.at(bears, lanes.kind, lanes.bears)
    longest = np.where(terms.to_the_end <= bears, np.inf, terms.longest * budget_s).max(axis=1)
    outlives = (terms.outlives * limit_left_s).max(axis=1)
    fits = (waiting.high_s <= longest[waiting.kind]) & (waiting.expected_s <= longest_guest_s)
    fits &= (waiting.limit_s <= outlives[waiting.kind]) | (waiting.rank <= lanes.wanted_rank.max())
    guests = np.flatnonzero(fits)
    return guests[np.argsort(waiting.expected_s[guests], kind="stable")]


def _match(
    waiting: Candidates,
    lanes: Residents,
    terms: Terms,
    guests: Ints,
    wait_s: Floats,
    columns: Ints,
    settings: PolicySettings,
    compatible: Compatible | None,
) -> list[Join]:
    """The best matching of these guests and lanes."""
    if len(guests) == 0:
        return []
    offers = look_at(waiting, lanes, terms, guests, wait_s, columns, settings, compatible)
    if not offers.ok.any():
        return []
    worth = _worth(offers, settings)
    return [offers.join(i, j, int(guests[i]), int(columns[j])) for i, j in best_matching(worth) if offers.ok[i, j]]


def look_at(
    waiting: Candidates,
    lanes: Residents,
    terms: Terms,
    guests: Ints,
    wait_s: Floats,
    columns: Ints,
    settings: PolicySettings,
    compatible: Compatible | None,
) -> Offers:
    """What these guests and lanes have to offer each other; `ok` where both promises hold and it pays."""
    cell = np.ix_(waiting.kind[guests], lanes.kind[columns])
    d = waiting.expected_s[guests][:, None]
    left = lanes.left_s[columns]
    stay, delay = together(d, left, terms, cell)
    if settings.objective == "saving":
        with np.errstate(invalid="ignore"):  # a resident without an end
            gain = d + left - np.maximum(stay, left + delay)
    else:
        gain = wait_s[:, None] + d - stay - delay
    high = waiting.high_s[guests][:, None]
    ok = within_promise(high, terms, cell, lanes.budget_s[columns], lanes.bears[columns]) & (gain > 0.0)
    outlives = terms.outlives[cell] * lanes.limit_left_s[columns]
    ok &= (waiting.limit_s[guests][:, None] <= outlives) | (waiting.rank[guests][:, None] <= lanes.wanted_rank[columns])
    if waiting.own_pct is not None:  # an owner's own cap knows no exploration
        own_pct = waiting.own_pct[guests][:, None]
        ok &= (own_pct >= settings.guest_cap_pct) | ((terms.stay_high[cell] - 1.0) * 100.0 <= own_pct)
    if compatible is not None and ok.any():
        ok &= compatible(guests, columns)
    return Offers(stay, delay, gain, terms.explored[cell], ok)


def within_promise(
    high_s: Floats | float, terms: Terms, cell: tuple[Ints, ...], budget_s: Floats, bears: Floats
) -> Bools:
    """Whether a guest keeps the resident's promise at worst: it leaves in time, or may stay until the resident ends."""
    kept: Bools = (high_s <= terms.longest[cell] * budget_s) | (terms.to_the_end[cell] <= bears)
    return kept


def together(d: Floats, left_s: Floats, terms: Terms, cell: tuple[Ints, ...]) -> tuple[Floats, Floats]:
    """How long guests of duration `d` stay, and how much they delay residents that have `left_s` to go.

    The one that ends later goes on alone, at full speed.
    """
    stay, delay = d * terms.stay[cell], d * terms.delay[cell]
    to_the_end = left_s * (1.0 / terms.resident_mean[cell] - 1.0)
    shared = left_s + to_the_end
    with np.errstate(invalid="ignore"):  # a resident without an end: inf - inf, which nobody looks at
        stays = np.where(stay <= shared, stay, shared + d - shared / terms.stay[cell])
    return stays, np.minimum(delay, to_the_end)


def at_worst(left_s: Floats, terms: Terms, cell: tuple[Ints, ...]) -> tuple[Floats, Floats]:
    """How long those that have `left_s` to go share at worst until they end, and what it costs who came last."""
    shared: Floats = left_s / terms.resident_low[cell]
    return shared, shared * (1.0 - 1.0 / terms.stay_high[cell])


def _worth(offers: Offers, settings: PolicySettings) -> Floats:
    """What a pair is worth to the matching; 0 where it may not be.

    For completion, every guest that gains shall get a lane, and then the time until guests are done plus what it costs
    their residents shall be least: short guests first, where they are fast and do little harm. For saving, card time.
    """
    if settings.objective == "saving":
        worth = offers.gain_s
    else:
        cost = offers.stay_s + HARM * offers.delay_s
        worth = (min(offers.ok.shape) + 1) * cost[offers.ok].max() - cost
    return np.where(offers.ok, worth, 0.0)


def best_matching(worth: Floats) -> list[tuple[int, int]]:
    """Rows and columns of the matching that is worth most."""
    if worth.shape[1] == 1:
        return [(int(np.argmax(worth[:, 0])), 0)]
    if worth.shape[0] == 1:
        return [(0, int(np.argmax(worth[0])))]
    rows, columns = linear_sum_assignment(worth, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
