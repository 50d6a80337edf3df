"""`Knowledge` that knows: the measured rates themselves, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.simulate.workload import Pairs


class MeasuredKnowledge:
    """The rates of a pairs table. Pairs that cannot share have rate 1: they must be ruled out elsewhere."""

    def __init__(self, pairs: Pairs) -> None:
        self._at = {name: i for i, name in enumerate(pairs.profiles)}
        self._rate = np.where(np.isfinite(pairs.rate), pairs.rate, 1.0)

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        rate = self._rate[np.ix_([self._at[name] for name in victims], [self._at[name] for name in neighbours])]
        return RateTable(rate, rate)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        """Nothing to learn."""
