"""Cells of the knowledge base: how one kind of job slows another, with spread and evidence; ISD and PS of rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

PRIOR_PAIRS = 2.0
"""How many pairs' worth of belief in the mean over all cells a cell starts with."""

CELL_RATES = 10.0
"""So many rates for seven coefficients make the regression as good as the cells; a round guess."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Log slow-down of `victim` clusters beside `neighbour` clusters."""

    victim: int
    neighbour: int
    mean: float
    """Shrunk towards the mean of all cells where there is little evidence."""
    sd: float
    """Between pairs of this cell, not of the mean."""
    pairs: int

    @property
    def rate(self) -> float:
        return math.exp(-max(self.mean, 0.0))


def make_cells(k: int, victim: Index, neighbour: Index, log_slowdown: Floats) -> list[Cell]:
    """Cells from measured log slow-downs and the clusters of who was measured beside whom."""
    overall = float(log_slowdown.mean()) if len(log_slowdown) else 0.0
    spread = float(log_slowdown.std()) if len(log_slowdown) > 1 else 0.3
    cells = []
    for v in range(k):
        for n in range(k):
            mine = log_slowdown[(victim == v) & (neighbour == n)]
            count = len(mine)
            mean = (float(mine.sum()) + PRIOR_PAIRS * overall) / (count + PRIOR_PAIRS)
            deviation = float(np.square(mine - mean).sum()) + PRIOR_PAIRS * spread**2
            cells.append(Cell(v, n, mean, math.sqrt(deviation / (count + PRIOR_PAIRS)), count))
    return cells


def cell_tables(cells: Sequence[Cell], k: int, clusters: Index) -> tuple[Floats, Floats]:
    """Mean and variance of the log slow-down of jobs of these clusters, victims in rows; NaN without a cluster (-1)."""
    mean, variance = np.full((k + 1, k + 1), np.nan), np.full((k + 1, k + 1), np.nan)
    for cell in cells:
        mean[cell.victim, cell.neighbour] = cell.mean
        variance[cell.victim, cell.neighbour] = cell.sd**2 * (1.0 + 1.0 / (cell.pairs + PRIOR_PAIRS))
    at = np.ix_(clusters, clusters)
    return mean[at], variance[at]


def towards_cells(
    mean: Floats, variance: Floats, cell_mean: Floats, cell_variance: Floats, share: Floats
) -> tuple[Floats, Floats]:
    """Log slow-downs moved `share` of the way towards their cells; as they are where there is no cell.

    Both may rest on the same pairs, so that agreeing does not make them more certain: the variance is a mixture's.
    """
    share = np.where(np.isnan(cell_mean), 0.0, share)
    towards, wide = np.nan_to_num(cell_mean), np.nan_to_num(cell_variance)
    both = (1.0 - share) * variance + share * wide + share * (1.0 - share) * np.square(mean - towards)
    return (1.0 - share) * mean + share * towards, both


def cell_share(rates: int) -> float:
    """How far to move predictions towards their cells when the regression was fitted on so many rates with telemetry.

    1 where there are none, half at `CELL_RATES`, next to nothing after hundreds: cells do not tell jobs of a cluster
    apart, and say less of other families of jobs than the regression does (docs/knowledge.md).
    """
    return CELL_RATES / (CELL_RATES + rates)


def isd_matrix(cells: Sequence[Cell], k: int) -> Floats:
    """ISD in % of each cluster (row) beside each (column); NaN without evidence."""
    matrix = np.full((k, k), np.nan)
    for cell in cells:
        if cell.pairs:
            matrix[cell.victim, cell.neighbour] = (1.0 / cell.rate - 1.0) * 100.0
    return matrix


def ps_matrix(cells: Sequence[Cell], k: int) -> Floats:
    """PS in % of two jobs of equal length, by cluster; NaN without evidence."""
    rate = np.full((k, k), np.nan)
    for cell in cells:
        if cell.pairs:
            rate[cell.victim, cell.neighbour] = cell.rate
    return packing_saving_pct(rate, rate.T)


def packing_saving_pct(rate_a: Floats, rate_b: Floats) -> Floats:
    """PS of two jobs that take equally long alone: the slower goes on alone when the faster is done."""
    fast, slow = np.maximum(rate_a, rate_b), np.minimum(rate_a, rate_b)
    saving: Floats = (1.0 - (1.0 / fast + 1.0 - slow / fast) / 2.0) * 100.0
    return saving


def worse_isd_pct(rate_a: Floats, rate_b: Floats) -> Floats:
    """ISD of the job that suffers more."""
    worse: Floats = (1.0 / np.minimum(rate_a, rate_b) - 1.0) * 100.0
    return worse


def tercile_clusters(aggressor: Floats) -> Index:
    """Clusters of jobs without telemetry: light, middle and heavy thirds by how hard they press on others."""
    order = np.argsort(np.argsort(aggressor, kind="stable"), kind="stable")
    return (order * 3 // len(aggressor)).astype(np.intp)
