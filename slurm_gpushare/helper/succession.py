"""Succession: the next job in the queue joins a card whose only sharer ends soon, and has the card after it.

Otherwise Slurm starts that job on all of the card as soon as it is empty, and nobody can join it there. The successor
comes as the *resident*: its promise is about its whole run, and whoever is there counts as its guest from now on.
docs/scheduling.md has the rule.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slurm_gpushare.helper.guests import Bools, Candidates, Floats, Ints, Join, Residents, Terms, at_worst, together
from slurm_gpushare.protocol.policy import PolicySettings

AT_ONCE = 64
"""Jobs from the head of the queue, and lanes that end first, that are looked at: the plan stays near-linear."""

MayUse = Callable[[Ints, Ints], Bools]
"""Which of these waiting jobs (rows) could have which of these lanes' cards (columns) whole."""


def ending_first(left_s: Floats) -> Ints:
    """The lanes to look at, in order."""
    return np.argsort(left_s, kind="stable")[:AT_ONCE]


def succeed(
    waiting: Candidates,
    lanes: Residents,
    terms: Terms,
    settings: PolicySettings,
    longest_guest_s: float,
    wait_s: Floats,
    compatible: MayUse | None = None,
    may_use: MayUse | None = None,
) -> list[Join]:
    """In queue order, each job takes the first of `lanes` that it could have whole, or keeps all of them for itself.

    So no card goes to a job while one of higher priority could have it whole. Lanes are in the order of `ending_first`.
    """
    free = lanes.left_s <= longest_guest_s
    joins: list[Join] = []
    for i in range(len(waiting.kind)):
        row, columns = np.array([i]), np.flatnonzero(free)
        if len(columns) == 0:
            break
        if may_use is not None:
            columns = columns[may_use(row, columns)[0]]
            if len(columns) == 0:
                continue
        join = _join(i, int(columns[0]), waiting, lanes, terms, settings, float(wait_s[i]))
        if join is None or (compatible is not None and not compatible(row, columns[:1]).all()):
            free[columns] = False
        else:
            free[join.lane] = False
            joins.append(join)
    return joins


def _join(
    i: int, lane: int, waiting: Candidates, lanes: Residents, terms: Terms, settings: PolicySettings, wait_s: float
) -> Join | None:
    """Job `i` on `lane`, if both promises hold and it pays."""
    d, left_s = waiting.expected_s[[i]], lanes.left_s[[lane]]
    cell = (waiting.kind[[i]], lanes.kind[[lane]])
    stay, delay = together(d, left_s, terms, cell)
    _, lost_s = at_worst(lanes.left_high_s[[lane]], terms, cell)
    own_pct = None if waiting.own_pct is None else float(waiting.own_pct[i])
    promise_pct = settings.promises.of(guest=False, own_pct=own_pct)
    gain_s = wait_s + d - stay - delay
    ok = terms.can_share[cell] & (lost_s <= promise_pct / 100.0 * waiting.low_s[[i]])
    ok &= 1.0 / terms.resident_low[cell] - 1.0 <= lanes.bears[lane]
    ok &= d * terms.stay[cell] >= left_s / terms.resident_mean[cell]  # else it is an ordinary guest
    ok &= (gain_s > 0.0) & (waiting.rank[i] <= lanes.wanted_rank[lane])
    return Join(i, lane, float(stay[0]), float(delay[0]), float(gain_s[0]), False) if ok[0] else None
