"""Statistics of a stream in fixed memory: however long a job runs, an attribute costs the same few thousand bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from slurm_gpushare.protocol.attributes import ATTRIBUTES
from slurm_gpushare.protocol.record import Stat

_QUANTILE = 0.95
_DIGITS = 4
_STEP = 0.02
"""Width of a bin of an unbounded quantity, relative to its value."""


class StreamSummary:
    """Running max, mean, min, 95th percentile and standard deviation of one attribute.

    Mean and deviation are over time: samples come closer together while a job is profiled than later.
    The percentile is a histogram's. NVML reports whole percentages, so bins of half a point lose nothing; of any other
    quantity a bin is 2 % wide.
    """

    __slots__ = ("_bins", "_m2", "_share", "_weight", "high", "low", "mean", "n")

    def __init__(self, *, share: bool) -> None:
        self.n = 0
        self.mean = 0.0
        self.high = -math.inf
        self.low = math.inf
        self._weight = 0.0
        self._m2 = 0.0  # Welford's sum of squared deviations: no cancellation, unlike sums of squares
        self._share = share
        self._bins: Counter[float] = Counter()

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take a sample that stands for so much time."""
        self.n += 1
        self._weight += weight
        delta = value - self.mean
        self.mean += delta * weight / self._weight
        self._m2 += weight * delta * (value - self.mean)
        self.high, self.low = max(self.high, value), min(self.low, value)
        self._bins[round(value * 2) if self._share else round(math.log(max(value, 1e-6)) / _STEP)] += 1

    def _quantile(self) -> float:
        left = self.n - math.ceil(_QUANTILE * self.n)
        for number in sorted(self._bins, reverse=True):
            left -= self._bins[number]
            if left < 0:
                return number / 2 if self._share else math.exp(number * _STEP)
        return self.low

    def stat(self) -> Stat:
        """What is known so far; `n` must not be 0."""
        sd = math.sqrt(self._m2 / self._weight)
        # Sums of floats may leave the range of what was added.
        mean, p95 = (min(self.high, max(self.low, value)) for value in (self.mean, self._quantile()))
        return Stat(self.n, *(round(value, _DIGITS) for value in (self.high, mean, self.low, p95, sd)))


class Summaries:
    """One `StreamSummary` for each attribute that has been seen."""

    def __init__(self) -> None:
        self._by_name: dict[str, StreamSummary] = {}

    def add(self, values: Mapping[str, float], seconds: float = 1.0) -> None:
        """Take one sample that stands for so long.

        A counter that ran backwards or a reading out of range counts as the nearest possible.
        """
        for name, value in values.items():
            summary = self._by_name.get(name)
            if summary is None:
                summary = self._by_name[name] = StreamSummary(share=ATTRIBUTES[name].is_share)
            summary.add(min(ATTRIBUTES[name].limit, max(0.0, value)), max(seconds, 1e-3))

    def get(self, name: str) -> Stat | None:
        summary = self._by_name.get(name)
        return summary.stat() if summary else None

    def stats(self) -> Mapping[str, Stat]:
        return MappingProxyType({name: summary.stat() for name, summary in self._by_name.items()})
