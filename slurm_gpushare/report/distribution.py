"""Many numbers in a few, with how many they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution in five numbers; None where there is nothing to describe."""

    count: int
    mean: float | None = None
    median: float | None = None
    p95: float | None = None
    max: float | None = None


def spread(values: Iterable[float]) -> Distribution:
    """The five numbers of `values`; percentiles by nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0)

    def rank(share: float) -> float:
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    return Distribution(len(ordered), fmean(ordered), rank(0.5), rank(0.95), ordered[-1])


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def weighted_mean(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Of (value, weight); what is unknown does not count."""
    known = [(value, weight) for value, weight in values if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
