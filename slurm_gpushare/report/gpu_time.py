"""A report's figures over its period: GPU time by hour, day or week, savings as they accrue, cards one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_gpushare.report.job_view import JobView
from slurm_gpushare.report.slow_down import lasted_s, rates_of, span_s
from slurm_gpushare.report.summary import Report

POINTS = 200


@dataclass(slots=True)
class Stretch:
    """GPU time between two moments, in hours: of cards with one job of ours, and of cards with two."""

    start_s: float
    end_s: float
    alone_h: float = 0.0
    shared_h: float = 0.0


def stretches(report: Report) -> list[Stretch]:
    """The period in hours, days or weeks, however many jobs there are."""
    found = _empty(report)
    if not found:
        return []
    for job in report.jobs:
        if job.start_s is not None:
            for stretch, hours in _spread(found, job.start_s, job.end_s or report.end_s):
                stretch.alone_h += job.cards * hours
    own = {job.raw_id for job in report.jobs}
    for span in report.spans:
        sides = (span.resident_job in own) + (span.guest_job in own)
        for stretch, hours in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            stretch.alone_h = max(stretch.alone_h - sides * span.gpus * hours, 0.0)
            stretch.shared_h += sides / 2 * span.gpus * hours
    return found


def _empty(report: Report) -> list[Stretch]:
    """The stretches from the first start on."""
    begun = [job.start_s for job in report.jobs if job.start_s is not None]
    first_s = max(report.start_s, min(begun, default=report.start_s))
    return [Stretch(a, b) for a, b in _steps(first_s, report.end_s)]


def shared_by_card(report: Report) -> tuple[list[Stretch], dict[tuple[str, int], list[float]]]:
    """The stretches of the period, and for each card that was shared the part of each for which it was."""
    found = _empty(report)
    at = {id(stretch): number for number, stretch in enumerate(found)}
    cards: dict[tuple[str, int], list[float]] = {}
    for span in report.spans:
        for stretch, hours in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            for card in span.cards:
                shares = cards.setdefault(card, [0.0] * len(found))
                shares[at[id(stretch)]] += hours * 3600 / (stretch.end_s - stretch.start_s)
    return found, cards


_STEPS = (
    (1 / 12, timedelta(minutes=1)), (0.5, timedelta(minutes=5)), (3.0, timedelta(hours=1)),
    (10.0, timedelta(hours=6)), (150.0, timedelta(days=1)), (math.inf, timedelta(days=7)),
)  # fmt: skip
"""How long a period may be for its stretches to be so long."""


def _steps(start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    days = (end_s - start_s) / 86400
    step = next(step for most_days, step in _STEPS if days <= most_days)
    at = datetime.fromtimestamp(start_s).replace(second=0, microsecond=0)
    if step >= timedelta(hours=1):
        at = at.replace(hour=0 if days > 3 else at.hour, minute=0)
    elif step > timedelta(minutes=1):
        at = at.replace(minute=at.minute // 5 * 5)
    while at.timestamp() < end_s:
        yield at.timestamp(), (at + step).timestamp()
        at += step


def _spread(found: list[Stretch], start_s: float, end_s: float) -> Iterator[tuple[Stretch, float]]:
    """The stretches that lie between two moments, each with its hours of it."""
    size_s = found[0].end_s - found[0].start_s
    at = max(int((start_s - found[0].start_s) // size_s) - 1, 0)  # a day has 23 hours now and then
    while at < len(found) and found[at].start_s < end_s:
        hours = (min(end_s, found[at].end_s) - max(start_s, found[at].start_s)) / 3600
        if hours > 0:
            yield found[at], hours
        at += 1


def accrued(report: Report) -> list[tuple[float, float]]:
    """GPU hours saved up to each moment of the period: a span's saving is booked while it lasts, not when it ends."""
    own = {job.raw_id for job in report.jobs}
    slopes: list[tuple[float, float]] = []
    for span in report.spans:
        resident, guest = rates_of(span)
        begin_s = max(float(span.start_s), report.start_s)
        end_s = min(span.start_s + lasted_s(span, report.end_s), report.end_s)
        if resident is not None and guest is not None and end_s > begin_s:
            share = ((span.resident_job in own) + (span.guest_job in own)) / 2
            running = span_s(span, report.end_s) / lasted_s(span, report.end_s)
            slope = share * running * span.gpus * (resident + guest - 1) / 3600
            slopes += [(begin_s, slope), (end_s, -slope)]
    return list(_thinned(_integral(sorted(slopes))))


def crosses_period(report: Report) -> bool:
    """Whether two jobs shared across the beginning or the end of the period."""
    return any(
        span.start_s < report.start_s or span.start_s + lasted_s(span, report.end_s) > report.end_s
        for span in report.spans
    )


def _integral(slopes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    total = slope = 0.0
    last_s: float | None = None
    for at_s, change in slopes:
        if last_s is not None:
            total += slope * (at_s - last_s)
        slope += change
        last_s = at_s
        yield at_s, total


def _thinned(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found = list(points)
    step = max(len(found) // POINTS, 1)
    return [*found[::step], found[-1]] if found else []


@dataclass(frozen=True, slots=True)
class CardStay:
    """A job on a card, in one of its two lanes that nobody else has meanwhile."""

    start_s: float
    end_s: float
    lane: int
    job: JobView


def stays_by_card(report: Report) -> dict[tuple[str, int], list[CardStay]]:
    """By node and index: the card's jobs that shared, as they started."""
    jobs = {job.raw_id: job for job in report.jobs if job.stays and job.start_s}
    members: dict[tuple[str, int], set[int]] = defaultdict(set)
    for span in report.spans:
        for card in span.cards:
            members[card] |= {span.resident_job, span.guest_job} & jobs.keys()
    found: dict[tuple[str, int], list[CardStay]] = {}
    for card, here in members.items():
        free_at_s = [0.0, 0.0]
        for job in sorted((jobs[raw_id] for raw_id in here), key=lambda job: job.start_s or 0):
            start_s, end_s = float(job.start_s or 0), report.end_s if job.end_s is None else job.end_s
            lane = 0 if free_at_s[0] <= start_s else 1
            free_at_s[lane] = end_s
            found.setdefault(card, []).append(CardStay(start_s, end_s, lane, job))
    return found
