"""Learning rates as jobs share: who slows, who is slowed, and what these two did together.

The log slow-down of victim i beside aggressor j is modelled as

    y_ij = prior_ij + v_i + a_j + p_ij,    rate = exp(-y)

where v is how sensitive a token is, a how hard it presses on others and p what only this pair does. All start at 0 with
the variances of `Spread` (from measured pairs: empirical Bayes), and each observation moves them by a Kalman step in
which the covariance between different tokens is dropped. So a step costs the same however much was seen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.rates import UNIT_SD, RateTable

Floats = NDArray[np.float64]

MIN_RATE = 0.02
"""Below it a job stands still for all purposes, and logarithms grow out of hand."""
OUTLIER_SD = 2.5
"""An observation further off than this many standard deviations counts only as if it were this far (Huber)."""

OUTLIERS_IN_A_ROW = 3
"""So many outliers of a pair on the same side, one after the other, are no accident: the jobs have changed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far log slow-downs scatter, as standard deviations: what may be learned, and what is noise."""

    victim: float
    aggressor: float
    pair: float
    noise: float = UNIT_SD
    """Of one observation of weight 1, as `Knowledge.observe` defines it; of weight w its square is 1 / w of that."""
    correlation: float = 0.0
    """Between a token's victim and aggressor effects."""


class Prior(Protocol):
    """What is believed of tokens before they were seen to share."""

    @property
    def spread(self) -> Spread: ...

    def log_slowdown(self, victims: Sequence[str], neighbours: Sequence[str]) -> Floats:
        """Expected log slow-down, victims in rows."""


@dataclass(frozen=True, slots=True)
class FlatPrior:
    """Nothing is known of any token: every pair gets the global mean.

    The numbers are those of the 328 measured V100 pairs (docs/knowledge.md).
    """

    mean: float = 0.426
    spread: Spread = field(default_factory=lambda: Spread(0.132, 0.314, 0.114, correlation=-0.58))

    def log_slowdown(self, victims: Sequence[str], neighbours: Sequence[str]) -> Floats:
        return np.full((len(victims), len(neighbours)), self.mean)


@dataclass(frozen=True, slots=True)
class Effect:
    """What was learned of a token, in log slow-down against the prior; 0 is as expected."""

    token: str
    victim: float
    victim_sd: float
    aggressor: float
    aggressor_sd: float


class LearnedKnowledge:
    """`Knowledge` that starts from a prior and learns from every observation, in constant time.

    `pessimism` is how many standard deviations of the prediction the `low` rates lie below the mean (1.28: nine of ten
    true rates are above). `half_life` is the number of observations of a token after which an old one counts half.
    """

    def __init__(self, prior: Prior | None = None, pessimism: float = 1.2816, half_life: float = 200.0) -> None:
        self.prior: Prior = prior or FlatPrior()
        self.pessimism = pessimism
        spread = self.prior.spread
        cross = spread.correlation * spread.victim * spread.aggressor
        self._start = (spread.victim**2, cross, spread.aggressor**2)
        self._pair_start = spread.pair**2
        self._noise = spread.noise**2
        self._keep = 0.5 ** (1.0 / half_life)
        self._index: dict[str, int] = {}
        self._effect = np.zeros((0, 2))  # victim, aggressor
        self._variance = np.zeros((0, 3))  # victim, covariance, aggressor
        self._pairs: dict[tuple[int, int], int] = {}
        self._pair_index = np.zeros((0, 2), dtype=np.intp)
        self._pair_effect = np.zeros(0)
        self._pair_variance = np.zeros(0)
        self._surprises: dict[int, int] = {}  # outliers of a pair in a row, negative when it was faster
        self._views: list[RateView] = []
        self.observations = 0

    def __len__(self) -> int:
        """How many tokens have been seen to share."""
        return len(self._index)

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        rows, columns = self._places(victims), self._places(neighbours)
        effect, variance = self._padded()
        log = self.prior.log_slowdown(victims, neighbours) + effect[rows, 0][:, None] + effect[columns, 1][None, :]
        spread = variance[rows, 0][:, None] + variance[columns, 2][None, :]
        same = (rows[:, None] == columns[None, :]) & (rows[:, None] >= 0)
        spread = np.where(same, spread + 2.0 * variance[rows, 1][:, None], spread) + self._pair_start
        for row, column, pair in self._seen_pairs(rows, columns):
            log[row, column] += self._pair_effect[pair]
            spread[row, column] += self._pair_variance[pair] - self._pair_start
        return _table(log, spread, self.pessimism)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        if not (math.isfinite(rate) and rate > 0.0 and math.isfinite(weight) and weight > 0.0):
            raise BadInput(f"observed rate {rate:g} with weight {weight:g}", "Both must be finite and above 0.")
        expected = float(self.prior.log_slowdown((victim,), (neighbour,))[0, 0])
        i, j = self._place(victim), self._place(neighbour)
        seen = -math.log(min(max(rate, MIN_RATE), 1.0))
        pair = self._pair(i, j)
        self._step(i, j, pair, seen - expected, weight)
        self.observations += 1
        for view in self._views:
            view._touch(i, j, pair)

    def effects(self) -> list[Effect]:
        """What was learned of every token that has been seen, by token."""
        sd = np.sqrt(np.maximum(self._variance, 0.0))
        return [
            Effect(
                token,
                float(self._effect[at, 0]),
                float(sd[at, 0]),
                float(self._effect[at, 1]),
                float(sd[at, 2]),
            )
            for token, at in sorted(self._index.items())
        ]

    def view(self, tokens: Sequence[str]) -> RateView:
        """A dense table of these tokens that follows later observations until `release`d."""
        for token in tokens:
            self._place(token)
        view = RateView(self, tokens)
        self._views.append(view)
        return view

    def release(self, view: RateView) -> None:
        """Stop keeping `view` up to date."""
        self._views.remove(view)

    def _step(self, i: int, j: int, pair: int, residual: float, weight: float) -> None:
        vi, ci, ai = self._drifted(i)
        vj, cj, aj = (vi, ci, ai) if i == j else self._drifted(j)
        p = float(self._pair_variance[pair])
        p = min(p / self._keep, self._pair_start)
        innovation = residual - float(self._effect[i, 0]) - float(self._effect[j, 1]) - float(self._pair_effect[pair])
        total = vi + aj + p + (2.0 * ci if i == j else 0.0)
        noise = self._noise / weight
        limit = OUTLIER_SD * math.sqrt(total + noise)
        if abs(innovation) > limit:
            if self._lasting(pair, innovation > 0.0):
                self._forget(i, j, pair)
                self._step(i, j, pair, residual, weight)
                return
            noise += (total + noise) * (abs(innovation) / limit - 1.0)  # a larger noise: the shift stays bounded
        else:
            self._surprises.pop(pair, None)
        gain = 1.0 / (total + noise)
        self._pair_effect[pair] += p * gain * innovation
        self._pair_variance[pair] = p - p * p * gain
        if i == j:
            v, a = vi + ci, ai + ci
            self._effect[i] += (v * gain * innovation, a * gain * innovation)
            self._variance[i] = (vi - v * v * gain, ci - v * a * gain, ai - a * a * gain)
            return
        self._effect[i] += (vi * gain * innovation, ci * gain * innovation)
        self._effect[j] += (cj * gain * innovation, aj * gain * innovation)
        self._variance[i] = (vi - vi * vi * gain, ci - vi * ci * gain, ai - ci * ci * gain)
        self._variance[j] = (vj - cj * cj * gain, cj - cj * aj * gain, aj - aj * aj * gain)

    def _lasting(self, pair: int, slower: bool) -> bool:
        """Whether this outlier is one too many in the same direction to be an accident."""
        count = self._surprises.get(pair, 0)
        count = max(count, 0) + 1 if slower else min(count, 0) - 1
        self._surprises[pair] = count
        return abs(count) >= OUTLIERS_IN_A_ROW

    def _forget(self, i: int, j: int, pair: int) -> None:
        """The pair has changed: keep what is believed of it, but as uncertain as at the start."""
        self._surprises.pop(pair, None)
        self._pair_variance[pair] = self._pair_start
        self._variance[[i, j]] = self._start

    def _drifted(self, i: int) -> tuple[float, float, float]:
        """The token's variances, a little wider than they were: jobs change, so old evidence fades."""
        v, c, a = (float(value) for value in self._variance[i])
        grow = 1.0 / self._keep
        if v * grow > self._start[0] or a * grow > self._start[2]:
            return v, c, a
        return v * grow, c * grow, a * grow

    def _place(self, token: str) -> int:
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._effect):
            grown = max(16, 2 * place)
            self._effect = np.vstack([self._effect, np.zeros((grown - place, 2))])
            self._variance = np.vstack([self._variance, np.tile(self._start, (grown - place, 1))])
        return place

    def _pair(self, i: int, j: int) -> int:
        place = self._pairs.setdefault((i, j), len(self._pairs))
        if place == len(self._pair_effect):
            more = max(16, 2 * place) - place
            self._pair_index = np.vstack([self._pair_index, np.zeros((more, 2), dtype=np.intp)])
            self._pair_effect = np.concatenate([self._pair_effect, np.zeros(more)])
            self._pair_variance = np.concatenate([self._pair_variance, np.full(more, self._pair_start)])
        self._pair_index[place] = (i, j)
        return place

    def _places(self, tokens: Sequence[str]) -> NDArray[np.intp]:
        """Index of each token, -1 for one never seen."""
        return np.fromiter((self._index.get(token, -1) for token in tokens), dtype=np.intp, count=len(tokens))

    def _padded(self) -> tuple[Floats, Floats]:
        """Effects and variances with a last row, index -1, for tokens never seen."""
        return np.vstack([self._effect, np.zeros((1, 2))]), np.vstack([self._variance, np.array([self._start])])

    def _seen_pairs(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Iterable[tuple[int, int, int]]:
        """(row, column, pair) of every asked pair that was itself observed."""
        if len(rows) * len(columns) <= len(self._pairs):
            for r, i in enumerate(rows.tolist()):
                for c, j in enumerate(columns.tolist()):
                    pair = self._pairs.get((i, j))
                    if pair is not None:
                        yield r, c, pair
            return
        at_row: dict[int, list[int]] = {}
        at_column: dict[int, list[int]] = {}
        for r, i in enumerate(rows.tolist()):
            at_row.setdefault(i, []).append(r)
        for c, j in enumerate(columns.tolist()):
            at_column.setdefault(j, []).append(c)
        for (i, j), pair in self._pairs.items():
            for r in at_row.get(i, ()):
                for c in at_column.get(j, ()):
                    yield r, c, pair


class RateView:
    """Rates among fixed tokens as dense arrays that follow every observation.

    `mean[i, j]` and `low[i, j]` are the rates of `tokens[i]` beside `tokens[j]`, as in `RateTable`; what an observation
    changed is worked out when they are next read, so read them from the view each time.
    """

    def __init__(self, knowledge: LearnedKnowledge, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._knowledge = knowledge
        self._places = knowledge._places(self.tokens)
        self._at = {place: row for row, place in enumerate(self._places.tolist())}
        if len(self._at) < len(self.tokens):
            raise BadInput("a token twice in one view", "Give each token once.")
        self._log = knowledge.prior.log_slowdown(self.tokens, self.tokens)  # with what is known of the pair itself
        self._variance = np.full(self._log.shape, knowledge._pair_start)
        self._prior = self._log.copy()
        for row, column, pair in knowledge._seen_pairs(self._places, self._places):
            self._log[row, column] += knowledge._pair_effect[pair]
            self._variance[row, column] = knowledge._pair_variance[pair]
        self._mean, self._low = np.empty_like(self._log), np.empty_like(self._log)
        self._stale: set[int] = set(range(len(self.tokens)))

    @property
    def mean(self) -> Floats:
        self._update()
        return self._mean

    @property
    def low(self) -> Floats:
        self._update()
        return self._low

    def _touch(self, i: int, j: int, pair: int) -> None:
        row, column = self._at.get(i), self._at.get(j)
        if row is not None and column is not None:
            self._log[row, column] = self._prior[row, column] + self._knowledge._pair_effect[pair]
            self._variance[row, column] = self._knowledge._pair_variance[pair]
        self._stale.update(at for at in (row, column) if at is not None)

    def _update(self) -> None:
        if not self._stale:
            return
        if 4 * len(self._stale) >= len(self.tokens):
            self._fill(slice(None), slice(None))
        else:
            for at in self._stale:
                self._fill(slice(at, at + 1), slice(None))
                self._fill(slice(None), slice(at, at + 1))
        self._stale.clear()

    def _fill(self, rows: slice, columns: slice) -> None:
        effect, spread = self._knowledge._effect, self._knowledge._variance
        victims, neighbours = self._places[rows], self._places[columns]
        log = self._log[rows, columns] + effect[victims, 0][:, None] + effect[neighbours, 1]
        variance = self._variance[rows, columns] + spread[victims, 0][:, None] + spread[neighbours, 2]
        same = victims[:, None] == neighbours
        variance = np.where(same, variance + 2.0 * spread[victims, 1][:, None], variance)
        table = _table(log, variance, self._knowledge.pessimism)
        self._mean[rows, columns], self._low[rows, columns] = table.mean, table.low


def _table(log: Floats, variance: Floats, pessimism: float) -> RateTable:
    sd = np.sqrt(np.maximum(variance, 0.0))
    mean = np.exp(-np.maximum(log, 0.0))
    low = np.exp(-np.maximum(log + pessimism * sd, 0.0))
    return RateTable(np.maximum(mean, MIN_RATE), np.maximum(low, MIN_RATE))
