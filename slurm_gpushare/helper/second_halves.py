"""Second halves: who joins whom. A list of steps, each a rule of choice on what the ones before it have left.

Short jobs come first (`guests`), then what they leave goes to a few long ones (`long_guests`), and where somebody ends
soon to the head of the queue (`successors`). The helper's plan and the simulator take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from scipy.optimize import linear_sum_assignment

from slurm_gpushare.helper.rules import HARD_RULES, LONG_GUEST_RULES, RULES, SUCCESSOR_RULES, Offers, Scene
from slurm_gpushare.knowledge.rates import Bools, Floats, Ints
from slurm_gpushare.protocol.policy import PolicySettings


class Join(NamedTuple):
    """Waiting job `guest` joins lane `lane` (both by position in the scene)."""

    guest: int
    lane: int
    d: float  # duration that is expected of the guest alone
    stay_s: float
    delay_s: float  # what it costs the resident
    gain_s: float
    explored: bool = False
    succeeds: bool = False


class Halves(Protocol):
    """Who still waits for a second half (rows, in queue order), and which lanes are still open (columns)."""

    short_s: float  # jobs of at most this are short
    all_lanes: int  # how many there were at first

    def open(self) -> tuple[Ints, Ints]:
        """Rows and columns that are left."""

    def blocks(self) -> Iterable[tuple[Ints, Ints]]:
        """All of them, in as many parts as can be looked at together."""

    def expected_s(self, rows: Ints) -> Floats: ...

    def left_s(self, columns: Ints) -> Floats: ...

    def held_s(self) -> Floats:
        """For how long the lanes of the other places are still taken."""

    def scene(self, rows: Ints, columns: Ints) -> Scene: ...

    def join(self, rows: Ints, columns: Ints, joins: list[Join]) -> None:
        """Do it; `joins` are by position in `rows` and `columns`."""


Step = Callable[[Halves], None]


def steps(settings: PolicySettings, before_whole: bool = False) -> tuple[Step, ...]:
    """The steps of a policy. `before_whole`: those before empty cards are handed out, to save card time."""
    if settings.policy != "gpushare":
        return () if before_whole else (_unpromised,)
    if before_whole:
        return (guests,) if settings.objective == "saving" else ()
    return guests, long_guests, successors


# Guests: as many short jobs as gain by it.

POD = 64
"""Guests or lanes, whichever are fewer, that are matched exactly at once. More of both are dealt to several pods, which
keeps the plan near-linear."""
HARM = 0.5
"""Weight of a resident's delay against a guest's own time: the budget bounds the one, nothing but this the other."""
ROUNDS = 4
"""How often what the pods left over is dealt again."""


def guests(halves: Halves) -> None:
    """Short jobs join whom they gain by, those with the shortest stay first."""
    for rows, columns in halves.blocks():
        halves.join(rows, columns, choose_guests(halves.scene(rows, columns)))


def choose_guests(scene: Scene) -> list[Join]:
    waiting, lanes = scene.waiting, scene.lanes
    if len(waiting.kind) == 0 or len(lanes.kind) == 0:
        return []
    scene = scene.reserved()
    left = _sieved(scene)[:: -1 if scene.settings.objective == "saving" else 1][: 2 * len(lanes.kind) + 16]
    if len(left) == 0:
        return []
    wait_s = scene.waits_s(left)
    free = np.arange(len(lanes.kind))
    joins: list[Join] = []
    for _ in range(ROUNDS):
        pods = -(-min(len(left), len(free)) // POD)
        now: list[Join] = []
        for pod in range(pods):  # dealt like cards, so that each pod sees a fair sample of jobs and lanes
            mine = slice(pod, None, pods)
            now += _matched(Offers(scene, left[mine], free[mine], wait_s[mine])) if len(left[mine]) else []
        joins += now
        if pods == 1 or not now:
            break
        stay = ~np.isin(left, [join.guest for join in now])
        left, wait_s = left[stay], wait_s[stay]
        free = free[~np.isin(free, [join.lane for join in now])]
        if len(left) == 0 or len(free) == 0:
            break
    return joins


def _sieved(scene: Scene) -> Ints:
    """Jobs that some lane might take, shortest first: by kind, before anybody is looked at one by one."""
    waiting, lanes, costs = scene.waiting, scene.lanes, scene.costs

    def most(values: Floats) -> Floats:
        """Of the lanes of each kind."""
        found = np.full(costs.longest.shape[1], -1.0)
        np.maximum.at(found, lanes.kind, values)
        return found

    budget_s = np.maximum(lanes.budget_s, lanes.expected_budget_s)
    bears = np.maximum(lanes.bears, lanes.expected_budget_s / np.maximum(lanes.left_s, 1e-9))
    longest = np.where(costs.to_the_end <= most(bears), np.inf, costs.longest * most(budget_s)).max(axis=1)
    outlives = (costs.outlives * most(lanes.limit_left_s)).max(axis=1)
    fits = waiting.expected_s <= np.minimum(longest[waiting.kind], scene.short_s)
    fits &= (waiting.limit_s <= outlives[waiting.kind]) | (waiting.rank <= lanes.wanted_rank.max())
    rows = np.flatnonzero(fits)
    return rows[np.argsort(waiting.expected_s[rows], kind="stable")]


def _matched(offers: Offers) -> list[Join]:
    """The best matching of these jobs and lanes.

    For completion, every guest that gains shall get a lane, and then the time until guests are done plus what it costs
    their residents shall be least: short guests first, where they are fast and do little harm. For saving, card time.
    """
    ok = offers.allowed(RULES)
    if not ok.any():
        return []
    if offers.scene.settings.objective == "saving":
        worth = offers.gain_s
    else:
        cost = offers.stay_s + HARM * offers.delay_s
        worth = (min(ok.shape) + 1) * cost[ok].max() - cost
    return [_join(offers, i, j) for i, j in best_matching(np.where(ok, worth, 0.0)) if ok[i, j]]


def best_matching(worth: Floats) -> list[tuple[int, int]]:
    """Rows and columns of the matching that is worth most."""
    if worth.shape[1] == 1:
        return [(int(np.argmax(worth[:, 0])), 0)]
    if worth.shape[0] == 1:
        return [(0, int(np.argmax(worth[0])))]
    rows, columns = linear_sum_assignment(worth, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _join(offers: Offers, i: int, j: int, succeeds: bool = False) -> Join:
    """The offer in row `i` and column `j`, taken."""
    gain = offers.sooner_s if succeeds else offers.gain_s
    stay_s, delay_s, gain_s = (float(table[i, j]) for table in (offers.stay_s, offers.delay_s, gain))
    guest, lane = int(offers.rows[i]), int(offers.columns[j])
    explored = not succeeds and bool(offers.scene.costs.explored[offers.cell][i, j])
    return Join(guest, lane, float(offers.d[i, 0]), stay_s, delay_s, gain_s, explored, succeeds)


# Long guests. Short jobs come in bursts that nothing announces, and a card on which two long jobs sit has no lane for
# days. So the longer they stay, the fewer they are: whenever a burst comes, a known part of the lanes is open within
# any time. But who has waited for as long as it runs has waited enough.

AT_ONCE = 64
"""Jobs from the head of the queue, and lanes that end first, that are looked at: the plan stays near-linear."""
LONG_PART = 1.0 / 8.0
"""The part of the lanes that may be taken for longer than a short job stays; for k times as long, a k-th of that."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What there is besides the long jobs and the free lanes."""

    short_waiting: int  # short jobs without a place
    cards: int  # on which sharing jobs are
    held_s: Floats  # for how long the lanes of the other cards are still taken


def long_guests(halves: Halves) -> None:
    """A few long jobs join long ones where that keeps no short one waiting."""
    rows, columns = halves.open()
    if len(rows) == 0 or len(columns) == 0:
        return
    expected_s = halves.expected_s(rows)
    # One without a known end might stay for ever.
    long = rows[(expected_s > halves.short_s) & np.isfinite(expected_s)][:AT_ONCE]
    if len(long) == 0:
        return
    held_s = halves.held_s()
    short = int((expected_s <= halves.short_s).sum())
    backlog = Backlog(short, halves.all_lanes + len(held_s), held_s)
    halves.join(long, columns, choose_long_guests(halves.scene(long, columns), backlog))


def choose_long_guests(scene: Scene, backlog: Backlog) -> list[Join]:
    """Choose among long jobs guests for the lanes that the short have left."""
    if backlog.short_waiting > len(scene.lanes.kind):
        return []
    scene = scene.reserved()
    columns = np.flatnonzero(scene.lanes.left_s > scene.short_s)  # where somebody ends soon, succession decides
    rows = np.arange(len(scene.waiting.kind))
    offers = Offers(scene, rows, columns, scene.waits_s(rows))
    ok = offers.allowed(LONG_GUEST_RULES)
    if not ok.any():
        return []
    held_s, waiting = backlog.held_s, scene.waiting
    joins = []
    for i, j in sorted(best_matching(np.where(ok, offers.gain_s, 0.0))):
        if not ok[i, j]:
            continue
        both_s = min(float(offers.stay_s[i, j]), float(offers.left_s[j] + offers.delay_s[i, j]))
        with_it = np.append(held_s, both_s)
        enough = waiting.waited_s[i] >= waiting.expected_s[i]
        if enough or lanes_come_free(with_it, both_s, backlog.cards, scene.short_s):
            held_s = with_it
            joins.append(_join(offers, i, j))
    return joins


def lanes_come_free(held_s: Floats, longest_s: float, cards: int, short_s: float) -> bool:
    """Whether, of all cards, at most LONG_PART × short_s / t have their lane taken for longer than any t.

    Times beyond `longest_s` are not looked at: who sits there already is nothing that a shorter one could change.
    """
    longest_first = np.sort(held_s[held_s > short_s])[::-1]
    at_most_s = LONG_PART * cards * short_s / np.arange(1, len(longest_first) + 1)
    return bool((longest_first <= at_most_s)[longest_first <= longest_s].all())


# Successors. Otherwise Slurm starts the next job on all of the card as soon as it is empty, and nobody can join it
# there. A successor comes as the resident: whoever is there counts as its guest from now on.


def successors(halves: Halves) -> None:
    """The head of the queue joins cards whose only sharer ends soon, and has them after it."""
    rows, columns = halves.open()
    if len(rows) and len(columns):
        heads = rows[:AT_ONCE]
        ending = columns[np.argsort(halves.left_s(columns), kind="stable")[:AT_ONCE]]
        halves.join(heads, ending, choose_successors(halves.scene(heads, ending)))


def choose_successors(scene: Scene) -> list[Join]:
    """In queue order, each job takes the first of the lanes that it could have whole, or keeps all of them for itself.

    So no card goes to a job while one of higher priority could have it whole. Lanes are given those that end first
    first.
    """
    wait_s = scene.waits_s(np.arange(len(scene.waiting.kind)))
    free: Bools = scene.lanes.left_s <= scene.short_s
    joins: list[Join] = []
    for i in range(len(scene.waiting.kind)):
        row, columns = np.array([i]), np.flatnonzero(free)
        if len(columns) == 0:
            break
        if scene.fit is not None:
            columns = columns[scene.fit.may_use(row, columns)[0]]
            if len(columns) == 0:
                continue
        offers = Offers(scene, row, columns[:1], wait_s[row])
        if offers.allowed(SUCCESSOR_RULES).all():
            free[columns[0]] = False
            joins.append(_join(offers, 0, 0, succeeds=True))
        else:
            free[columns] = False
    return joins


# The policies without promises: in queue order, a job joins whom it may. `fcfs` takes the first card with room,
# `random` any, `paper` the first whose resident's cluster complements its own.


def _unpromised(halves: Halves) -> None:
    rows, columns = halves.open()
    if len(rows) and len(columns):
        halves.join(rows, columns, join_without_promises(halves.scene(rows, columns)))


def complementary(cluster: int | None, other: int | None, partners: tuple[int, ...]) -> bool:
    """The paper's rule: each cluster beside the one with which PS and ISD balance best."""
    known = cluster is not None and other is not None and 0 <= cluster < len(partners)
    return known and partners[cluster or 0] == other


def join_without_promises(scene: Scene) -> list[Join]:
    """Who joins whom under the policy named in the settings: only what is hard counts."""
    settings, waiting, lanes, costs = scene.settings, scene.waiting, scene.lanes, scene.costs
    wait_s = scene.waits_s(np.arange(len(waiting.kind)))
    random = np.random.default_rng(settings.seed)
    free = np.ones(len(lanes.kind), bool)
    joins: list[Join] = []
    for i in range(len(waiting.kind)):
        columns = np.flatnonzero(free)
        if len(columns) == 0:
            break
        row = np.array([i])
        ok = Offers(scene, row, columns, wait_s[row]).allowed(HARD_RULES)[0]
        if settings.policy == "paper" and scene.fit is not None:
            of_job, of_lanes = scene.fit.clusters
            ok &= np.array([complementary(of_job[i], of_lanes[j], settings.partners) for j in columns.tolist()], bool)
        allowed = columns[ok]
        if len(allowed) == 0:
            continue
        lane = int(random.choice(allowed) if settings.policy == "random" else allowed[0])
        free[lane] = False
        d, cell = float(waiting.expected_s[i]), (waiting.kind[i], lanes.kind[lane])
        stay, delay = d * float(costs.stay[cell]), d * float(costs.delay[cell])
        joins.append(Join(i, lane, d, stay, delay, float(wait_s[i]) + d - stay - delay))
    return joins
