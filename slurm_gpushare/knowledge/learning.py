"""Learning rates as jobs share: who slows, who is slowed, and what these two did together.

The log slow-down of victim i beside aggressor j has the form of `interference.py`, about what is believed beforehand:

    y_ij = prior_ij * exp(z_i + w_j) + c_i + e_j + p_ij,    rate = exp(-y)

z is how sensitive a token is and w how hard it presses, as factors; c and e are what it suffers and costs whatever the
other is; p is what only this pair does. All start at 0 with the variances of `Spread` (from measured pairs: empirical
Bayes). Each observation moves them by a Kalman step, linearised at the current estimate, in which the covariance
between different tokens is dropped. So a step costs the same however much was seen before.
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
MAX_LOG = -math.log(MIN_RATE)
MAX_FACTOR = 10.0
"""As a logarithm: no two tokens disturb each other more, against what was expected, and no exponential overflows."""
OUTLIER_SD = 2.5
"""An observation further off than this many standard deviations counts only as if it were this far (Huber)."""

OUTLIERS_IN_A_ROW = 3
"""So many outliers of a pair on the same side, one after the other, are no accident: the jobs have changed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far tokens and pairs scatter, as standard deviations: what may be learned, and what is noise."""

    sensitivity: float
    """Of z."""
    pressure: float
    """Of w."""
    offset: float
    """Of c, in log slow-down, as all below."""
    burden: float
    """Of e."""
    pair: float
    """Of p."""
    noise: float = UNIT_SD
    """Of one observation of weight 1, as `Knowledge.observe` defines it; of weight w its square is 1 / w of that."""


class Prior(Protocol):
    """What is believed of tokens before they were seen to share."""

    @property
    def spread(self) -> Spread: ...

    def log_slowdown(self, victims: Sequence[str], neighbours: Sequence[str]) -> Floats:
        """Expected log slow-down, victims in rows; of a token that nothing is known of, the typical one."""


@dataclass(frozen=True, slots=True)
class FlatPrior:
    """Nothing is known of any token: every pair gets the global mean.

    The numbers are what `gpushare kb fit` finds in the 328 measured V100 pairs (docs/knowledge.md).
    """

    mean: float = 0.426
    spread: Spread = field(default_factory=lambda: Spread(0.6, 0.6, 0.11, 0.13, 0.05))

    def log_slowdown(self, victims: Sequence[str], neighbours: Sequence[str]) -> Floats:
        return np.full((len(victims), len(neighbours)), self.mean)


@dataclass(frozen=True, slots=True)
class Effect:
    """What was learned of a token: log slow-down with the typical other, against the prior; 0 is as expected."""

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
        start = np.square([spread.sensitivity, spread.pressure, spread.offset, spread.burden])
        self._start = np.maximum(start, 1e-12)  # we divide by it
        self._pair_start = spread.pair**2
        self._noise = spread.noise**2
        self._fade = 1.0 - 0.5 ** (1.0 / half_life)
        self._index: dict[str, int] = {}
        self._effect = np.zeros((0, 4))  # z, w, c, e; the last row is always that of a token never seen
        self._variance = np.zeros((0, 4, 4))
        self._pairs: dict[tuple[int, int], int] = {}
        self._pair_effect = np.zeros(0)
        self._pair_variance = np.zeros(0)
        self._grow_tokens()
        self._surprises: dict[int, int] = {}  # outliers of a pair in a row, negative when it was faster
        self._views: list[RateView] = []
        self.observations = 0

    def __len__(self) -> int:
        """How many tokens have been seen to share."""
        return len(self._index)

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        rows, columns = self._places(victims), self._places(neighbours)
        prior = self.prior.log_slowdown(victims, neighbours)
        own, variance = np.zeros(prior.shape), np.full(prior.shape, self._pair_start)
        for row, column, pair in self._seen_pairs(rows, columns):
            own[row, column], variance[row, column] = self._pair_effect[pair], self._pair_variance[pair]
        return self._believed(prior, own, variance, rows, columns)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        if not (math.isfinite(rate) and rate > 0.0 and math.isfinite(weight) and weight > 0.0):
            raise BadInput(f"observed rate {rate:g} with weight {weight:g}", "Both must be finite and above 0.")
        expected = float(self.prior.log_slowdown((victim,), (neighbour,))[0, 0])
        i, j = self._place(victim), self._place(neighbour)
        seen = -math.log(min(max(rate, MIN_RATE), 1.0))
        pair = self._pair(i, j)
        self._step(i, j, pair, expected, seen, weight)
        self.observations += 1
        for view in self._views:
            view._touch(i, j, pair)

    def effects(self) -> list[Effect]:
        """What was learned of every token that has been seen, by token."""
        typical = float(self.prior.log_slowdown(("",), ("",))[0, 0])
        found = []
        for token, at in sorted(self._index.items()):
            z, w, c, e = self._effect[at].tolist()
            slopes = np.array([[typical * math.exp(z), 0.0, 1.0, 0.0], [0.0, typical * math.exp(w), 0.0, 1.0]])
            victim_sd, aggressor_sd = np.sqrt(np.diagonal(slopes @ self._variance[at] @ slopes.T)).tolist()
            victim, aggressor = typical * math.expm1(z) + c, typical * math.expm1(w) + e
            found.append(Effect(token, victim, victim_sd, aggressor, aggressor_sd))
        return found

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

    def _step(self, i: int, j: int, pair: int, expected: float, seen: float, weight: float) -> None:
        z, w, c, e = self._effect[i, 0], self._effect[j, 1], self._effect[i, 2], self._effect[j, 3]
        product = min(expected * math.exp(min(z + w, MAX_FACTOR)), MAX_LOG)
        slopes = {i: np.array([product, 0.0, 1.0, 0.0])}
        slopes[j] = slopes.get(j, 0.0) + np.array([0.0, product, 0.0, 1.0])
        variances = {token: self._faded(token) for token in slopes}
        pulls = {token: variances[token] @ slope for token, slope in slopes.items()}
        p = float(self._pair_variance[pair])
        p += self._fade * p * (1.0 - p / self._pair_start)
        innovation = float(seen - product - c - e - self._pair_effect[pair])
        total = p + sum(float(pulls[token] @ slope) for token, slope in slopes.items())
        noise = self._noise / weight
        limit = OUTLIER_SD * math.sqrt(total + noise)
        if abs(innovation) > limit:
            if self._lasting(pair, innovation > 0.0):
                self._forget(i, j, pair)
                self._step(i, j, pair, expected, seen, weight)
                return
            noise += (total + noise) * (abs(innovation) / limit - 1.0)  # a larger noise: the shift stays bounded
        else:
            self._surprises.pop(pair, None)
        gain = 1.0 / (total + noise)
        self._pair_effect[pair] += p * gain * innovation
        self._pair_variance[pair] = p - p * p * gain
        for token, pull in pulls.items():
            self._effect[token] += pull * (gain * innovation)
            self._variance[token] = variances[token] - np.outer(pull, pull) * gain

    def _believed(
        self, prior: Floats, own: Floats, variance: Floats, victims: NDArray[np.intp], neighbours: NDArray[np.intp]
    ) -> RateTable:
        """Rates of these places, given the prior and what is known of the pairs themselves."""
        z, _, c, _ = self._effect[victims].T
        _, w, _, e = self._effect[neighbours].T
        v, n = self._variance[victims], self._variance[neighbours]
        product = np.minimum(prior * np.exp(np.minimum(z[:, None] + w, MAX_FACTOR)), MAX_LOG)
        log = product + c[:, None] + e + own
        variance = variance + v[:, 2, 2, None] + n[:, 3, 3] + product**2 * (v[:, 0, 0, None] + n[:, 1, 1])
        variance = variance + 2.0 * product * (v[:, 0, 2, None] + n[:, 1, 3])
        row, column = np.nonzero((victims[:, None] == neighbours) & (victims[:, None] >= 0))  # beside its own kind
        if len(row):
            at, same = product[row, column], v[row]
            both = at**2 * same[:, 0, 1] + at * (same[:, 0, 3] + same[:, 1, 2]) + same[:, 2, 3]
            variance[row, column] += 2.0 * both
        sd = np.sqrt(np.maximum(variance, 0.0))
        mean, low = np.exp(-np.maximum(log, 0.0)), np.exp(-np.maximum(log + self.pessimism * sd, 0.0))
        return RateTable(np.clip(mean, MIN_RATE, 1.0), np.clip(low, MIN_RATE, 1.0))

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
        self._variance[[i, j]] = np.diag(self._start)

    def _faded(self, i: int) -> Floats:
        """The token's variances when its old evidence counts a little less: jobs change.

        Precision moves by the share `fade` from what it is to what it was at the start, here to first order.
        """
        variance = self._variance[i]
        faded: Floats = variance + self._fade * (variance - (variance / self._start) @ variance)
        return faded

    def _place(self, token: str) -> int:
        place = self._index.setdefault(token, len(self._index))
        if place + 1 == len(self._effect):
            self._grow_tokens()
        return place

    def _grow_tokens(self) -> None:
        more = max(16, len(self._effect))
        self._effect = np.concatenate([self._effect, np.zeros((more, 4))])
        self._variance = np.concatenate([self._variance, np.tile(np.diag(self._start), (more, 1, 1))])

    def _pair(self, i: int, j: int) -> int:
        place = self._pairs.setdefault((i, j), len(self._pairs))
        if place == len(self._pair_effect):
            more = max(16, place)
            self._pair_effect = np.concatenate([self._pair_effect, np.zeros(more)])
            self._pair_variance = np.concatenate([self._pair_variance, np.full(more, self._pair_start)])
        return place

    def _places(self, tokens: Sequence[str]) -> NDArray[np.intp]:
        """Index of each token, -1 for one never seen."""
        return np.fromiter((self._index.get(token, -1) for token in tokens), dtype=np.intp, count=len(tokens))

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
        self._prior = knowledge.prior.log_slowdown(self.tokens, self.tokens)
        self._own = np.zeros(self._prior.shape)  # what is known of the pair itself
        self._variance = np.full(self._prior.shape, knowledge._pair_start)
        for row, column, pair in knowledge._seen_pairs(self._places, self._places):
            self._own[row, column] = knowledge._pair_effect[pair]
            self._variance[row, column] = knowledge._pair_variance[pair]
        self._mean, self._low = np.empty_like(self._prior), np.empty_like(self._prior)
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
            self._own[row, column] = self._knowledge._pair_effect[pair]
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
        prior, own, variance = (table[rows, columns] for table in (self._prior, self._own, self._variance))
        table = self._knowledge._believed(prior, own, variance, self._places[rows], self._places[columns])
        self._mean[rows, columns], self._low[rows, columns] = table.mean, table.low
