"""Long guests: jobs that are too long for the express lane join long residents where that keeps no short one waiting.

Short jobs come in bursts that nothing announces, and a card on which two long jobs sit has no lane for days. So long
ones come after the short, and the longer they stay, the fewer they are: whenever a burst comes, a known part of the
lanes is open within any time. But who has waited for as long as it runs has waited enough. docs/scheduling.md has
the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_gpushare.helper.guests import (
    Candidates,
    Compatible,
    Floats,
    Ints,
    Join,
    Residents,
    Terms,
    best_matching,
    look_at,
    reserve,
)
from slurm_gpushare.protocol.policy import PolicySettings

AT_ONCE = 64
"""Long jobs from the head of the queue that are looked at: the plan stays near-linear."""
LONG_PART = 1.0 / 8.0
"""The part of the lanes that may be taken for longer than a short job stays; for k times as long, a k-th of that."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What there is besides the long jobs and the free lanes."""

    short_s: float  # jobs of at most this are short
    short_waiting: int  # that have no place in this plan
    head_rank: int  # of the first job without a place
    cards: int  # on which sharing jobs are
    held_s: Floats  # for how long the lanes of the other cards are still taken


def choose_long_guests(
    waiting: Candidates,
    lanes: Residents,
    terms: Terms,
    settings: PolicySettings,
    backlog: Backlog,
    wait_s: Floats,
    compatible: Compatible | None = None,
) -> list[Join]:
    """Choose among long jobs (in queue order) guests for the lanes that the short have left."""
    if len(waiting.kind) == 0 or len(lanes.kind) == 0 or backlog.short_waiting > len(lanes.kind):
        return []
    lanes = reserve(lanes, backlog.head_rank)
    columns = np.flatnonzero(lanes.left_s > backlog.short_s)  # where somebody ends soon, succession decides
    rows = np.arange(len(waiting.kind))
    offers = look_at(waiting, lanes, terms, rows, wait_s, columns, settings, compatible)
    if not offers.ok.any():
        return []
    held_s = backlog.held_s
    joins = []
    for i, j in sorted(best_matching(np.where(offers.ok, offers.gain_s, 0.0))):
        if not offers.ok[i, j]:
            continue
        both_s = min(float(offers.stay_s[i, j]), float(lanes.left_s[columns[j]] + offers.delay_s[i, j]))
        with_it = np.append(held_s, both_s)
        if lanes_come_free(with_it, both_s, backlog) or waiting.waited_s[i] >= waiting.expected_s[i]:
            held_s = with_it
            joins.append(offers.join(i, j, i, int(columns[j])))
    return joins


def lanes_come_free(held_s: Floats, longest_s: float, backlog: Backlog) -> bool:
    """Whether, of all cards, at most LONG_PART × short_s / t have their lane taken for longer than any t.

    Times beyond `longest_s` are not looked at: who sits there already is nothing that a shorter one could change.
    """
    longest_first = np.sort(held_s[held_s > backlog.short_s])[::-1]
    at_most_s = LONG_PART * backlog.cards * backlog.short_s / np.arange(1, len(longest_first) + 1)
    return bool((longest_first <= at_most_s)[longest_first <= longest_s].all())


def first_long(expected_s: Floats, short_s: float) -> Ints:
    """The long jobs to look at, of those given in queue order; one without a known end might stay for ever."""
    return np.flatnonzero((expected_s > short_s) & np.isfinite(expected_s))[:AT_ONCE]
