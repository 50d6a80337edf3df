"""What is believed of a token before it was seen to share: the cell of its cluster and its neighbour's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.kb import KnowledgeBase
from slurm_gpushare.knowledge.learning import FlatPrior, Spread
from slurm_gpushare.knowledge.rates import UNIT_SD

Floats = NDArray[np.float64]

FLOOR = 0.02
"""No spread is believed to be smaller."""


class CellPrior:
    """Log slow-downs by cluster; a token without a cluster gets the mean over all of them."""

    def __init__(self, base: KnowledgeBase) -> None:
        self.cluster_of: dict[str, int | None] = {}
        self._k = base.k
        means = np.full((base.k + 1, base.k + 1), np.nan)
        for cell in base.cells:
            means[cell.victim, cell.neighbour] = cell.mean
        means[:-1, -1], means[-1, :-1] = np.nanmean(means[:-1, :-1], axis=1), np.nanmean(means[:-1, :-1], axis=0)
        means[-1, -1] = np.nanmean(means[:-1, :-1])
        self._means = means
        self.spread = within_cells(base)

    def log_slowdown(self, victims: Sequence[str], neighbours: Sequence[str]) -> Floats:
        cells: Floats = self._means[np.ix_(self._cells(victims), self._cells(neighbours))]
        return cells

    def _cells(self, tokens: Sequence[str]) -> list[int]:
        found = (self.cluster_of.get(token) for token in tokens)
        return [cluster if cluster is not None and 0 <= cluster < self._k else self._k for cluster in found]


def within_cells(base: KnowledgeBase, noise: float = UNIT_SD) -> Spread:
    """How far tokens and pairs scatter about their cells, from the rates that the base was fitted on.

    Where the base keeps none, the spreads of the measured V100 pairs about their common mean.
    """
    if len(base.measured) < 20:
        return replace(FlatPrior().spread, noise=noise)
    table = np.array(base.measured)
    victim, neighbour = table[:, 0].astype(np.intp), table[:, 1].astype(np.intp)
    cluster = np.array([member.cluster for member in base.members], dtype=np.intp)
    means = {(cell.victim, cell.neighbour): cell.mean for cell in base.cells}
    expected = np.array([means[v, n] for v, n in zip(cluster[victim], cluster[neighbour], strict=True)])
    rest = np.maximum(-np.log(np.minimum(table[:, 2], 1.0)), 0.0) - expected
    rows, count = np.arange(len(table)), len(base.members)
    design = np.zeros((len(table), 4, count))  # of the effects z, w, c, e of each member, where they are small
    design[rows, 0, victim] = design[rows, 1, neighbour] = expected
    design[rows, 2, victim] = design[rows, 3, neighbour] = 1.0
    flat = design.reshape(len(table), -1)
    ridge = np.vstack([flat, 0.3 * np.eye(4 * count)])
    effects = np.linalg.lstsq(ridge, np.concatenate([rest, np.zeros(4 * count)]), rcond=None)[0]
    z, w, c, e = np.maximum(effects.reshape(4, count).std(axis=1), FLOOR).tolist()
    return Spread(z, w, c, e, max(float((rest - flat @ effects).std()), FLOOR), noise)
