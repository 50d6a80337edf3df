"""Statistics of a stream in fixed memory: however long a job runs, an attribute costs the same few hundred bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from slurm_gpushare.protocol.attributes import ATTRIBUTES
from slurm_gpushare.protocol.record import Stat

_QUANTILE = 0.95
_DIGITS = 4


class _Histogram:
    """The quantile of a percentage: NVML reports whole ones, so bins of half a point lose nothing."""

    __slots__ = ("counts", "n")

    def __init__(self) -> None:
        self.counts = [0] * 201
        self.n = 0

    def add(self, value: float) -> None:
        self.counts[min(200, max(0, round(value * 2)))] += 1
        self.n += 1

    def quantile(self) -> float:
        wanted, below = math.ceil(_QUANTILE * self.n), 0
        for index, count in enumerate(self.counts):
            below += count
            if below >= wanted:
                return index / 2
        return 100.0


class _PSquare:
    """The quantile of an unbounded quantity by Jain and Chlamtac's P² algorithm: five markers, no samples kept."""

    __slots__ = ("_heights", "_places", "_wanted")

    def __init__(self) -> None:
        self._heights: list[float] = []
        self._places = [1.0, 2.0, 3.0, 4.0, 5.0]
        self._wanted = [1.0, 1 + 2 * _QUANTILE, 1 + 4 * _QUANTILE, 3 + 2 * _QUANTILE, 5.0]

    def add(self, value: float) -> None:
        heights, places, wanted = self._heights, self._places, self._wanted
        if len(heights) < 5:
            heights.append(value)
            heights.sort()
            return
        if value < heights[0]:
            heights[0] = value
            cell = 0
        elif value >= heights[4]:
            heights[4] = value
            cell = 3
        else:
            cell = next(i for i in (3, 2, 1, 0) if value >= heights[i])
        for i in range(cell + 1, 5):
            places[i] += 1
        for i, step in enumerate((0, _QUANTILE / 2, _QUANTILE, (1 + _QUANTILE) / 2, 1)):
            wanted[i] += step
        for i in (1, 2, 3):
            offset = wanted[i] - places[i]
            if (offset >= 1 and places[i + 1] - places[i] > 1) or (offset <= -1 and places[i - 1] - places[i] < -1):
                self._move(i, 1 if offset > 0 else -1)

    def _move(self, i: int, step: int) -> None:
        q, n = self._heights, self._places
        parabola = q[i] + step / (n[i + 1] - n[i - 1]) * (
            (n[i] - n[i - 1] + step) * (q[i + 1] - q[i]) / (n[i + 1] - n[i])
            + (n[i + 1] - n[i] - step) * (q[i] - q[i - 1]) / (n[i] - n[i - 1])
        )
        if not q[i - 1] < parabola < q[i + 1]:
            parabola = q[i] + step * (q[i + step] - q[i]) / (n[i + step] - n[i])
        q[i] = parabola
        n[i] += step

    def quantile(self) -> float:
        if len(self._heights) < 5:
            return self._heights[max(0, math.ceil(_QUANTILE * len(self._heights)) - 1)]
        return self._heights[2]


class StreamSummary:
    """Running max, mean, min, 95th percentile and standard deviation of one attribute."""

    __slots__ = ("_m2", "_quantile", "high", "low", "mean", "n")

    def __init__(self, *, share: bool) -> None:
        self.n = 0
        self.mean = 0.0
        self.high = -math.inf
        self.low = math.inf
        self._m2 = 0.0  # Welford's sum of squared deviations: no cancellation, unlike sums of squares
        self._quantile: _Histogram | _PSquare = _Histogram() if share else _PSquare()

    def add(self, value: float) -> None:
        self.n += 1
        delta = value - self.mean
        self.mean += delta / self.n
        self._m2 += delta * (value - self.mean)
        if value > self.high:
            self.high = value
        if value < self.low:
            self.low = value
        self._quantile.add(value)

    def stat(self) -> Stat:
        """What is known so far; `n` must not be 0."""
        p95 = min(self.high, max(self.low, self._quantile.quantile()))
        high, mean, low, p95, sd = (
            round(value, _DIGITS) for value in (self.high, self.mean, self.low, p95, math.sqrt(self._m2 / self.n))
        )
        return Stat(self.n, high, mean, low, p95, sd)


class Summaries:
    """One `StreamSummary` for each attribute that has been seen."""

    def __init__(self) -> None:
        self._by_name: dict[str, StreamSummary] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Take one sample. A counter that ran backwards or a reading out of range counts as the nearest possible."""
        for name, value in values.items():
            summary = self._by_name.get(name)
            if summary is None:
                summary = self._by_name[name] = StreamSummary(share=ATTRIBUTES[name].is_share)
            summary.add(min(ATTRIBUTES[name].limit, max(0.0, value)))

    def get(self, name: str) -> Stat | None:
        summary = self._by_name.get(name)
        return summary.stat() if summary else None

    def stats(self) -> Mapping[str, Stat]:
        return MappingProxyType({name: summary.stat() for name, summary in self._by_name.items()})
