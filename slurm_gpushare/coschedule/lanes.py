"""The express lane: which pending jobs join which residents on the second half of their cards.

This is the heart of the plan, on arrays, so that the helper (thousands of jobs a tick) and the simulator (a decision
an event) run the same code. A *lane* is a card with one sharer and room beside it. Jobs of one *kind* (token) share
their rates, so what a lane can take is worked out once per kind, not per job.
docs/scheduling.md has the rules and formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from slurm_gpushare.coschedule.settings import PolicySettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

POD_LANES = 128
"""Lanes matched exactly at once. Larger queues are dealt to several pods, which keeps the plan near-linear."""
NEVER = -1.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates between kinds: row the job, column its neighbour."""

    mean: Floats
    low: Floats
    can_share: Bools

    @property
    def high(self) -> Floats:
        """The optimistic end; the interval is symmetric in the logarithm."""
        return np.minimum(self.mean * self.mean / self.low, 1.0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Pending jobs that may become guests, by column, in priority order."""

    rank: Ints  # place in the whole queue, other jobs included
    kind: Ints
    expected_s: Floats
    limit_s: Floats
    wait_s: Floats  # expected, for a whole card
    cap_pct: Floats  # most that it may be slowed


@dataclass(frozen=True, slots=True)
class Lanes:
    """Residents with room beside them, by column."""

    kind: Ints
    left_s: Floats  # expected alone-time still to run
    budget_s: Floats  # delay that it may still suffer
    limit_left_s: Floats
    wanted_rank: Ints  # the first pending job that could use this card whole


@dataclass(frozen=True, slots=True)
class Join:
    """Waiting job `guest` joins lane `lane` (both by position); times in seconds."""

    guest: int
    lane: int
    stay_s: float
    delay_s: float  # what it costs the resident
    gain_s: float
    explored: bool


Compatible = Callable[[Ints, Ints], Bools]
"""Which of these waiting jobs (rows) may sit on which of these lanes (columns), the rates aside."""


def fill_lanes(
    waiting: Waiting,
    lanes: Lanes,
    rates: Rates,
    settings: PolicySettings,
    mean_duration_s: float,
    compatible: Compatible | None = None,
) -> list[Join]:
    """Choose guests for the lanes: as many as gain by it, those with the shortest stay first."""
    if len(waiting.kind) == 0 or len(lanes.kind) == 0:
        return []
    room = _Room(lanes, rates, settings)
    # A first sieve per kind, so that only jobs that some lane can take are looked at one by one.
    d = waiting.expected_s
    fits = (d <= room.longest.max(axis=1)[waiting.kind]) & (d <= longest_guest_s(mean_duration_s, settings))
    fits &= (waiting.limit_s <= room.gone.max(axis=1)[waiting.kind]) | (waiting.rank <= lanes.wanted_rank.max())
    candidates = np.flatnonzero(fits)
    if len(candidates) == 0:
        return []
    candidates = candidates[np.argsort(d[candidates], kind="stable")]
    candidates = candidates[: 2 * len(lanes.kind) + 16]
    joins: list[Join] = []
    for guests, columns in _pods(candidates, len(lanes.kind)):
        joins += _match(waiting, lanes, room, guests, columns, settings, compatible)
    return joins


def longest_guest_s(mean_duration_s: float, settings: PolicySettings) -> float:
    """Guests are short: a long one would hold for days a lane that hundreds of short ones could pass through."""
    return np.inf if settings.objective == "saving" else settings.express_factor * mean_duration_s


class _Room:
    """What each lane (column) can take of each kind (row)."""

    def __init__(self, lanes: Lanes, rates: Rates, settings: PolicySettings) -> None:
        at = lanes.kind
        self.guest_mean, self.resident_mean = rates.mean[:, at], rates.mean[at, :].T
        guest_low, resident_low = rates.low[:, at], rates.low[at, :].T
        self.guest_low = guest_low
        slowest = 1.0 / (1.0 + settings.guest_cap_pct / 100.0)
        # Beside a guest of duration d for d / r_guest, the resident loses (1 - r_resident) of that time.
        promised = lanes.budget_s * guest_low / np.maximum(1.0 - resident_low, 1e-9)
        # Rates too uncertain to promise anything may still be tried where even a very bad outcome fits the budget.
        worst = settings.explore_rate
        tried = np.minimum(promised, lanes.budget_s * worst / (1.0 - worst))
        surely = guest_low >= slowest
        perhaps = ~surely & (rates.high[:, at] >= slowest)
        self.explored = perhaps
        longest = np.where(surely, promised, np.where(perhaps, tried, NEVER))
        self.longest: Floats = np.where(rates.can_share[:, at], longest, NEVER)
        # The priority promise, on time limits, which grow with the slow-down where the site lets them.
        stretch = self.guest_mean / self.resident_mean if settings.extend_time_limit else 1.0
        self.gone: Floats = np.broadcast_to(lanes.limit_left_s * stretch, self.longest.shape)


def _pods(candidates: Ints, lanes: int) -> list[tuple[Ints, Ints]]:
    """Deal jobs and lanes to pods of bounded size, so that each sees a fair sample of both."""
    pods = -(-lanes // POD_LANES)
    return [(candidates[pod::pods], np.arange(pod, lanes, pods)) for pod in range(pods)]


def _match(
    waiting: Waiting,
    lanes: Lanes,
    room: _Room,
    guests: Ints,
    columns: Ints,
    settings: PolicySettings,
    compatible: Compatible | None,
) -> list[Join]:
    """The best matching of these guests and lanes."""
    if len(guests) == 0:
        return []
    cell = np.ix_(waiting.kind[guests], columns)
    d = waiting.expected_s[guests][:, None]
    stay = d / room.guest_mean[cell]
    delay = stay * (1.0 - room.resident_mean[cell])
    gain = waiting.wait_s[guests][:, None] + d - stay - delay
    ok = (d <= room.longest[cell]) & (gain > 0.0)
    ok &= (waiting.limit_s[guests][:, None] <= room.gone[cell]) | (
        waiting.rank[guests][:, None] <= lanes.wanted_rank[columns]
    )
    own_cap = waiting.cap_pct[guests][:, None]
    if (own_cap < settings.guest_cap_pct).any():
        ok &= (own_cap >= settings.guest_cap_pct) | (1.0 / room.guest_low[cell] - 1.0 <= own_cap / 100.0)
    if compatible is not None and ok.any():
        ok &= compatible(guests, columns)
    if not ok.any():
        return []
    weight = _weight(stay, delay, d, ok, settings)
    return [
        Join(
            guest=int(guests[i]),
            lane=int(columns[j]),
            stay_s=float(stay[i, j]),
            delay_s=float(delay[i, j]),
            gain_s=float(gain[i, j]),
            explored=bool(room.explored[cell][i, j]),
        )
        for i, j in _assign(weight)
        if ok[i, j]
    ]


def _weight(stay: Floats, delay: Floats, d: Floats, ok: Bools, settings: PolicySettings) -> Floats:
    """What a pair is worth to the matching; 0 where it may not be.

    For completion, every guest that gains shall get a lane, and the lanes turn over fastest with the shortest stays
    (shortest processing time first is optimal for total completion time). For saving, card time counts.
    """
    value = np.maximum(d - delay, 1e-6) if settings.objective == "saving" else 2.0 * stay[ok].max() - stay
    return np.where(ok, value, 0.0)


def _assign(weight: Floats) -> list[tuple[int, int]]:
    if weight.shape[1] == 1:
        return [(int(np.argmax(weight[:, 0])), 0)]
    if weight.shape[0] == 1:
        return [(0, int(np.argmax(weight[0])))]
    rows, columns = linear_sum_assignment(weight, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
