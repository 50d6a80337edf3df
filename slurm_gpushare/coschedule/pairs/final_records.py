"""What the final record of a job that shared says of its rates: of spans of a few seconds too.

A job's own share of the GPU's time, while shared over while alone, is how fast it ran. The record sums up all of its
neighbours; where it had several, those whose effect was not measured meanwhile are told apart by what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slurm_gpushare.coschedule.pairs.contended import CARD, is_believed
from slurm_gpushare.knowledge.rates import UNIT_SD
from slurm_gpushare.telemetry.record import Record, Stat

ACTIVITY = "proc_sm_pct"
MIN_ACTIVITY_PCT = 3.0
"""Below it the ratio of two samples says nothing."""
ACTIVITY_MEAN = f"{ACTIVITY}_mean"
"""As a profile has it."""
MIN_SAMPLES = 3
ENOUGH = 20
"""The mean of so many samples of a run says what this run does, better than what earlier ones did."""
SAMPLES_APART = 2.0
"""So many samples in a row tell as much as one: the card's figures are averages over up to a second."""
LEAST_ERROR = 0.03
"""Relative; what no number of samples takes away."""
PROFILE_ERROR = 0.05
"""Relative, of a profile's activity against that of this run alone: runs differ."""
LEAST_PART = 0.05
"""A neighbour with less of the shared time than this cannot be told apart from the others."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A neighbour of the job: how long, and what is known of the job's rate beside it."""

    token: str
    seconds: float
    expected: float
    """The rate as it was predicted."""
    measured: float | None = None
    """The rate as it was measured while they shared."""


class Alone(NamedTuple):
    """How active a job is alone, in per cent, and how far that may be off (relative)."""

    pct: float
    error: float


@dataclass(frozen=True, slots=True)
class Lesson:
    """A rate that was seen, and its weight as an observation."""

    rate: float
    weight: float


def lessons(record: Record, alone_pct: float | None, beside: Mapping[int, Beside]) -> dict[int, Lesson]:
    """What is learned of each neighbour, by job. `alone_pct` is the activity alone as the profile has it."""
    shared, base = record.shared.stats.get(ACTIVITY), activity_alone(record, alone_pct)
    if base is None or shared is None or shared.n < MIN_SAMPLES or base.pct < MIN_ACTIVITY_PCT:
        return {}
    seconds = sum(item.seconds for item in beside.values())
    new = {job: item for job, item in beside.items() if item.measured is None and item.seconds >= LEAST_PART * seconds}
    if not new or seconds < 0.9 * record.shared.shared_s:  # somebody was there of whom nothing is known
        return {}
    part = sum(item.seconds for item in new.values()) / seconds
    known = sum(item.seconds * (item.measured or item.expected) for job, item in beside.items() if job not in new)
    left = shared.mean / base.pct - known / seconds  # of the mean rate, for those who are new
    expected = sum(item.seconds * item.expected for item in new.values()) / seconds
    card = record.shared.stats.get(CARD)
    foreseen = expected + known / seconds
    if left <= 0.0 or not is_believed(shared.mean / base.pct, foreseen, card.mean if card else None):
        return {}
    error = math.hypot(relative_error(shared, shared.n), base.error, LEAST_ERROR) / part
    found = {}
    for job, item in new.items():
        among = item.seconds / seconds
        rate = min(1.0, max(0.02, item.expected * left / expected))
        weight = (UNIT_SD / error) ** 2 * (among / part) ** 2
        found[job] = Lesson(rate, min(1.0, max(0.01, weight)))
    return found


def activity_alone(record: Record, profile_pct: float | None, least: int = MIN_SAMPLES) -> Alone | None:
    """By this run if it has enough samples alone, else by the profile; without a profile `least` are enough."""
    own = record.alone.stats.get(ACTIVITY)
    if own is not None and own.n >= (least if profile_pct is None else ENOUGH):
        return Alone(own.mean, relative_error(own, own.n))
    return None if profile_pct is None else Alone(profile_pct, PROFILE_ERROR)


def relative_error(stat: Stat, n: int) -> float:
    """Relative error of the mean of `n` samples that scatter like these."""
    return stat.sd / max(stat.mean, 1e-9) / math.sqrt(max(1.0, n / SAMPLES_APART))
