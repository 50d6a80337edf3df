"""What a replay measured, in the figures of `gpushare-lab simulate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from types import MappingProxyType

import numpy as np

from slurm_gpushare.whatif.traces import SimulatedJobs
from slurm_gpushare.whatif.world import FinishedRun, figures

NEVER_PLACED = ("exclusive", "packed")
"""Policies without the helper: there is nobody to win a card."""


Card = tuple[str, int]
"""A node's name and the index of its GPU."""


@dataclass(frozen=True, slots=True)
class JobStay:
    """One job on its cards, by the clocks of the replay and of the job itself; seconds since the replay's start."""

    job: int
    node: str
    gpus: tuple[int, ...]
    submit_s: float
    joined_s: float
    """When it began to compute."""
    ended_s: float
    placed: bool
    """Whether the helper chose where it goes."""
    attempts: int = 1

    @property
    def cards(self) -> list[Card]:
        return [(self.node, gpu) for gpu in self.gpus]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A policy's run."""

    policy: str
    stays: tuple[JobStay, ...]
    complete: bool
    """False for a run that was interrupted: the stays are those that had ended."""
    wall_s: float
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """What the helper itself counted: cards, holds, ticks."""

    def figures(self, work: SimulatedJobs) -> dict[str, float | int | None]:
        """The same names as the simulator's, and what only a real run has."""
        if not self.stays:
            return {}
        jobs = [stay.job for stay in self.stays]
        won, lost = cards_won_and_lost(self.stays) if self.policy not in NEVER_PLACED else (None, None)
        found: dict[str, float | int | None] = dict(
            figures(
                FinishedRun(
                    submit_s=np.array([stay.submit_s for stay in self.stays]),
                    end_s=np.array([stay.ended_s for stay in self.stays]),
                    ran_s=np.array([stay.ended_s - stay.joined_s for stay in self.stays]),
                    duration_s=work.duration_s[jobs],
                    num_gpus=work.num_gpus[jobs],
                    shared=np.array([bool(beside) for beside in neighbours(self.stays)]),
                    guest=np.array([_came_later(stay, b) for stay, b in self._with_neighbours()]),
                    busy_s=busy_s(self.stays),
                    gpus=work.gpus,
                )
            )
        )
        resubmitted = sum(stay.attempts - 1 for stay in self.stays)
        return found | {
            "wall_s": self.wall_s,
            "cards_won": won,
            "cards_lost": lost,
            "resubmitted": resubmitted,
            "handover_s": handover_s(self.stays),
        }

    def _with_neighbours(self) -> Iterator[tuple[JobStay, list[JobStay]]]:
        return zip(self.stays, neighbours(self.stays), strict=True)


def by_card(stays: Sequence[JobStay]) -> dict[Card, list[JobStay]]:
    """The stays of each card, in the order in which they began."""
    cards: dict[Card, list[JobStay]] = {}
    for stay in sorted(stays, key=lambda stay: stay.joined_s):
        for card in stay.cards:
            cards.setdefault(card, []).append(stay)
    return dict(sorted(cards.items()))


def neighbours(stays: Sequence[JobStay]) -> list[list[JobStay]]:
    """Who was on one of its cards at the same time, for each stay."""
    cards = by_card(stays)
    return [
        [
            other
            for other in {id(other): other for card in stay.cards for other in cards[card]}.values()
            if other is not stay and other.joined_s < stay.ended_s and stay.joined_s < other.ended_s
        ]
        for stay in stays
    ]


def _came_later(stay: JobStay, beside: Sequence[JobStay]) -> bool:
    return any(other.joined_s < stay.joined_s for other in beside)


def busy_s(stays: Sequence[JobStay]) -> float:
    """Time in which cards had a job that computed."""
    return sum(end - start for row in by_card(stays).values() for start, end in _busy(row))


def _busy(row: Sequence[JobStay]) -> list[tuple[float, float]]:
    """The times from a card's first job to its being empty again."""
    spans: list[tuple[float, float]] = []
    for stay in row:
        if spans and stay.joined_s < spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stay.ended_s)
        else:
            spans.append((stay.joined_s, stay.ended_s))
    return spans


def _contested(stays: Sequence[JobStay]) -> Iterator[tuple[float, JobStay]]:
    """Each time that a card became empty while the job that got it next was waiting already: when, and which job.

    Of several cards that one job got, the last to become empty counts: until then it could not start.
    """
    freed: dict[int, tuple[float, JobStay]] = {}
    for row in by_card(stays).values():
        starts = {stay.joined_s: stay for stay in row}
        for (_, empty_s), (next_s, _) in pairwise(_busy(row)):
            stay = starts[next_s]
            freed[stay.job] = max(empty_s, freed.get(stay.job, (0.0, stay))[0]), stay
    return ((empty_s, stay) for empty_s, stay in freed.values() if stay.submit_s < empty_s)


def cards_won_and_lost(stays: Sequence[JobStay]) -> tuple[int, int]:
    """Cards that became empty while somebody waited, and went to a job that the helper had placed, or to another."""
    placed = [stay.placed for _, stay in _contested(stays)]
    return sum(placed), len(placed) - sum(placed)


def handover_s(stays: Sequence[JobStay]) -> float | None:
    """From one job's end to the moment at which the next, which was waiting, computes on that card: median."""
    gaps = [stay.joined_s - empty_s for empty_s, stay in _contested(stays)]
    return median(gaps) if gaps else None


def start_s(stays: Sequence[JobStay]) -> float:
    """What Slurm and the node need to hand a card over, on average; where nobody ever waited, to start a job.

    Where jobs have several cards the median: Slurm keeps some cards empty until a wide job has all of its own.
    """
    gaps = [stay.joined_s - empty_s for empty_s, stay in _contested(stays)]
    average = median if any(len(stay.gpus) > 1 for stay in stays) else fmean
    return average(gaps or [stay.joined_s - stay.submit_s for stay in stays] or [0.0])
