"""How far a job gets while neighbours come and go: exact, whenever the job happens to look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpushare_lab.emulator.card import Demand, SlotUse

RateOf = Callable[[Sequence[Demand]], float]


@dataclass(frozen=True)
class Step:
    """What happened between two looks at the card."""

    work_s: float  # seconds of lone running that were done
    rate: float  # the speed at the end of the step
    until_us: int  # where the step ended: when `limit_s` was reached, if it was, else the time asked for


def advance(from_us: int, to_us: int, limit_s: float, others: Sequence[SlotUse], rate_of: RateOf) -> Step:
    """Work done from `from_us` to `to_us`, at most `limit_s`, each stretch at the speed that its neighbours allow.

    Neighbours are known by the times at which they came and went, not by when they were noticed, so that a late look
    gives the same result as an early one.
    """
    edges = {from_us, to_us}
    for other in others:
        for edge_us in (other.since_us, other.until_us):
            if edge_us is not None and from_us < edge_us < to_us:
                edges.add(edge_us)
    ordered = sorted(edges)
    done_s, rate = 0.0, rate_of(_present(others, to_us - 1))
    for begin_us, end_us in pairwise(ordered):
        rate = rate_of(_present(others, begin_us))
        piece_s = (end_us - begin_us) / 1e6 * rate
        if done_s + piece_s >= limit_s:
            return Step(limit_s, rate, begin_us + round((limit_s - done_s) / rate * 1e6))
        done_s += piece_s
    return Step(done_s, rate, to_us)


def _present(others: Sequence[SlotUse], at_us: int) -> list[Demand]:
    return [
        other.demand
        for other in others
        if other.since_us <= at_us and (other.until_us is None or at_us < other.until_us)
    ]
