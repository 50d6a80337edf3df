"""Learning rates as jobs share: telemetry tells where a token starts, every pairing that was seen refines it.

Each observation is a step of `beliefs.py`, in constant time. What was observed is kept by pair, so that all of it can
be solved jointly now and then (`Refit`), outside the helper's tick: that also learns how far to trust telemetry here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.knowledge.beliefs import OUTLIER_SD, Beliefs, Posterior
from slurm_gpushare.knowledge.empirical import adapt
from slurm_gpushare.knowledge.interference import (
    MAX_RATE,
    MIN_RATE,
    PESSIMISM,
    Interference,
    Observed,
    Telemetry,
    expected,
)
from slurm_gpushare.knowledge.rates import UNIT_SD, Index, RateTable
from slurm_gpushare.protocol.errors import BadInput

OUTLIERS_IN_A_ROW = 3
"""So many outliers of a pair on the same side, one after the other, are no accident: the jobs have changed."""
CHANGED = 0.1
"""What earlier observations of such jobs still count."""
JOINT_PAIRS = 1000
"""A joint solution takes in so many pairs, the latest; others are added one by one. It bounds the time it takes."""


@dataclass(slots=True)
class Evidence:
    """All that was observed of one job beside another: the mean log slow-down and the sum of the weights."""

    log_slowdown: float
    weight: float
    seen: int
    """The number of the last observation."""

    def add(self, log_slowdown: float, weight: float, kept: float, number: int) -> None:
        old = self.weight * kept
        self.log_slowdown = (old * self.log_slowdown + weight * log_slowdown) / (old + weight)
        self.weight, self.seen = old + weight, number


class LearnedKnowledge:
    """`Knowledge` that starts from telemetry and learns from every observation, in constant time.

    `half_life` is the number of observations of a token after which an old one counts half.
    """

    def __init__(self, general: Interference | None = None, half_life: float = 200.0) -> None:
        self.general = general or Interference()
        self.beliefs = Beliefs(self.general)
        self.observations = 0
        self._fade = 1.0 - 0.5 ** (1.0 / half_life)
        self._index: dict[str, int] = {}
        self._shares: dict[int, tuple[float, float, float, float]] = {}
        self._evidence: dict[tuple[int, int], Evidence] = {}
        self._surprises: dict[tuple[int, int], int] = {}  # outliers of a pair in a row, negative when it was faster

    def __len__(self) -> int:
        """How many tokens are known, by telemetry or because they were seen to share."""
        return len(self._index)

    def profiled(self, tokens: Sequence[str], jobs: Telemetry) -> None:
        """Take in the telemetry of tokens: what is believed of them before they were seen to share."""
        rows = np.array([self._place(token) for token in tokens], dtype=np.intp)
        doubt = np.ones(len(jobs)) if jobs.doubt is None else jobs.doubt
        columns = (jobs.busy.tolist(), jobs.access.tolist(), jobs.filled.tolist(), doubt.tolist())
        for row, shares in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
            self._shares[row] = shares
        self.beliefs.describe(rows, jobs)

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        rows, at_row = np.unique(self._places(victims), return_inverse=True)
        columns, at_column = np.unique(self._places(neighbours), return_inverse=True)
        table = expected(*self.beliefs.table(rows, columns), PESSIMISM)
        if len(rows) == len(victims) and len(columns) == len(neighbours) and _sorted(at_row) and _sorted(at_column):
            return table
        at = np.ix_(at_row, at_column)
        return RateTable(table.mean[at], table.low[at])

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        if not (math.isfinite(rate) and rate > 0.0 and math.isfinite(weight) and weight > 0.0):
            raise BadInput(f"observed rate {rate:g} with weight {weight:g}", "Both must be finite and above 0.")
        i, j = self._place(victim), self._place(neighbour)
        self.observations += 1
        seen = _log_slowdown(rate)
        surprise = self.beliefs.step(i, j, seen, UNIT_SD**2 / weight, self._fade)
        self._note((i, j), seen, weight)
        if self._lasting((i, j), surprise):
            self._forget(i, j, seen, weight)

    def recall(self, observations: Iterable[tuple[str, str, float, float]]) -> None:
        """Take in earlier observations (victim, neighbour, rate, weight); they count from the next `refit` on.

        Much faster than observing them one by one: for the start, from the store.
        """
        for victim, neighbour, rate, weight in observations:
            pair = self._place(victim), self._place(neighbour)
            self.observations += 1
            self._note(pair, _log_slowdown(rate), weight)

    def _note(self, pair: tuple[int, int], seen: float, weight: float) -> None:
        known = self._evidence.setdefault(pair, Evidence(seen, 0.0, 0))
        known.add(seen, weight, 1.0 - self._fade, self.observations)

    def refit(self) -> None:
        """Solve all that was observed jointly, now. The helper does this beside its ticks, with `Refit`."""
        refit = Refit(self)
        refit.run()
        refit.install()

    def evidence(self) -> Mapping[tuple[str, str], Evidence]:
        """What was observed, by victim and neighbour."""
        names = list(self._index)
        return {(names[i], names[j]): known for (i, j), known in self._evidence.items()}

    def _lasting(self, pair: tuple[int, int], surprise: float) -> bool:
        """Whether this observation is one outlier too many in the same direction to be an accident."""
        if abs(surprise) <= OUTLIER_SD:
            self._surprises.pop(pair, None)
            return False
        count = self._surprises.get(pair, 0)
        count = max(count, 0) + 1 if surprise > 0.0 else min(count, 0) - 1
        self._surprises[pair] = count
        return abs(count) >= OUTLIERS_IN_A_ROW

    def _forget(self, i: int, j: int, seen: float, weight: float) -> None:
        """The pair has changed: what was seen before counts little from now on."""
        self._surprises.pop((i, j), None)
        for (a, b), known in self._evidence.items():
            if {a, b} & {i, j}:
                known.weight *= CHANGED
        self._evidence[i, j] = Evidence(seen, weight, self.observations)
        self.beliefs.forget(i, j)
        self.beliefs.step(i, j, seen, UNIT_SD**2 / weight)

    def _place(self, token: str) -> int:
        place = self._index.setdefault(token, len(self._index))
        self.beliefs.reserve(place + 1)
        return place

    def _places(self, tokens: Sequence[str]) -> Index:
        """Index of each token, -1 for one never seen."""
        return np.fromiter((self._index.get(token, -1) for token in tokens), dtype=np.intp, count=len(tokens))


class Refit:
    """A joint solution of all that a `LearnedKnowledge` has observed when it is made.

    `run` touches nothing else and may take seconds, in a thread of its own; `install` puts the result in force and
    adds what was observed meanwhile.
    """

    def __init__(self, knowledge: LearnedKnowledge) -> None:
        self._knowledge = knowledge
        self._from = knowledge.observations
        latest = sorted(knowledge._evidence.items(), key=lambda item: -item[1].seen)
        rows = [(i, j, known.log_slowdown, UNIT_SD / math.sqrt(known.weight)) for (i, j), known in latest]
        self._rows, self._others = rows[:JOINT_PAIRS], rows[JOINT_PAIRS:]
        unknown = (math.nan, math.nan, math.nan, 1.0)
        shares = [knowledge._shares.get(at, unknown) for at in range(len(knowledge))]
        self._jobs = Telemetry(*np.array(shares, dtype=np.float64).reshape(-1, 4).T)
        self._solved: Beliefs | None = None

    def run(self) -> None:
        """Solve. Jobs that nothing was observed of are left out of it."""
        who = np.unique(np.array([row[:2] for row in self._rows], dtype=np.intp))
        place = {at: number for number, at in enumerate(who.tolist())}
        columns = np.array([(place[i], place[j], y, noise) for i, j, y, noise in self._rows]).reshape(-1, 4).T
        seen = Observed(columns[0].astype(np.intp), columns[1].astype(np.intp), np.exp(-columns[2]), columns[3])
        jobs = self._jobs.take(who)
        general = adapt(self._knowledge.general, jobs, seen)
        joint = Posterior(general, jobs, seen).beliefs()
        solved = Beliefs(general, self._jobs)
        solved.mean, solved.covariance = joint.mean, joint.covariance
        for name in ("own", "follow", "variance"):
            getattr(solved, name)[who] = getattr(joint, name)[: len(who)]
        for (i, j), pair in joint.pairs.items():
            row = solved.pair(int(who[i]), int(who[j]))
            for name in ("pair_own", "pair_follow", "pair_variance"):
                getattr(solved, name)[row] = getattr(joint, name)[pair]
        for i, j, y, noise in self._others:
            solved.step(i, j, y, noise**2)
        self._solved = solved

    def install(self) -> None:
        """Believe the solution; without one, nothing changes."""
        knowledge, solved = self._knowledge, self._solved
        if solved is None:
            return
        solved.reserve(len(knowledge))
        for at in range(len(self._jobs), len(knowledge)):
            if at in knowledge._shares:
                solved.describe(np.array([at]), Telemetry(*(np.array([share]) for share in knowledge._shares[at])))
        knowledge.beliefs = solved
        for (i, j), known in sorted(knowledge._evidence.items(), key=lambda item: item[1].seen):
            if known.seen > self._from:
                solved.step(i, j, known.log_slowdown, UNIT_SD**2 / known.weight)


def _log_slowdown(rate: float) -> float:
    return -math.log(min(max(rate, MIN_RATE), MAX_RATE))


def _sorted(places: Index) -> bool:
    return bool(np.array_equal(places, np.arange(len(places))))
