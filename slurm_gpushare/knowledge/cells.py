"""Cells of the knowledge base: how one kind of job slows another, with spread and evidence; ISD and PS of rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.rates import Floats, Index

SPEAKERS = 300
"""So many tokens of a cluster are enough to say what it does."""
PRIOR_PAIRS = 2.0
"""How many pairs' worth of belief in the mean over all cells a cell starts with."""


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


def believed_cells(k: int, clusters: Mapping[str, int], knowledge: LearnedKnowledge) -> list[Cell]:
    """Cells from what is known of the tokens in them; `pairs` is how many were observed.

    Of each cluster the most observed tokens speak, at most `SPEAKERS`.
    """
    observed: dict[str, int] = {}
    counts = np.zeros((k, k), dtype=np.intp)
    for victim, neighbour in knowledge.evidence():
        for token in (victim, neighbour):
            observed[token] = observed.get(token, 0) + 1
        v, n = clusters.get(victim, -1), clusters.get(neighbour, -1)
        if 0 <= v < k and 0 <= n < k:
            counts[v, n] += 1
    ranked = sorted(clusters, key=lambda token: (-observed.get(token, 0), token))
    members = [[token for token in ranked if clusters[token] == number][:SPEAKERS] for number in range(k)]
    cells = []
    for v in range(k):
        for n in range(k):
            if not members[v] or not members[n]:
                cells.append(Cell(v, n, math.nan, math.nan, 0))
                continue
            log = -np.log(knowledge.rates(members[v], members[n]).mean)
            cells.append(Cell(v, n, float(log.mean()), float(log.std()), int(counts[v, n])))
    return cells


def balanced_partners(cells: Sequence[Cell], k: int) -> tuple[int, ...]:
    """For each cluster the one to sit beside: of all ways to pair clusters up, the best balance of PS and ISD.

    A cluster may be its own partner. The balance is the saving less the mean slow-down, in points.
    """
    rate = rate_matrix(cells, k)
    slowed = isd_matrix(cells, k, evidence=0)
    balance = np.nan_to_num(packing_saving_pct(rate, rate.T) - (slowed + slowed.T) / 2.0, nan=-1e6)
    return max(_pairings(tuple(range(k))), key=lambda way: sum(float(balance[v, n]) for v, n in enumerate(way)))


def _pairings(clusters: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ways in which each of `clusters` has a partner among them that has it in turn, as partners by cluster."""
    for way in permutations(clusters):
        if all(way[partner] == cluster for cluster, partner in enumerate(way)):
            yield way


def rate_matrix(cells: Sequence[Cell], k: int, evidence: int = 0) -> Floats:
    """Rate of each cluster (row) beside each (column); NaN with less evidence."""
    rate = np.full((k, k), np.nan)
    for cell in cells:
        if cell.pairs >= evidence:
            rate[cell.victim, cell.neighbour] = cell.rate
    return rate


def isd_matrix(cells: Sequence[Cell], k: int, evidence: int = 1) -> Floats:
    """ISD in % of each cluster (row) beside each (column); NaN with less evidence."""
    return (1.0 / rate_matrix(cells, k, evidence) - 1.0) * 100.0


def ps_matrix(cells: Sequence[Cell], k: int, evidence: int = 1) -> Floats:
    """PS in % of two jobs of equal length, by cluster; NaN with less evidence."""
    rate = rate_matrix(cells, k, evidence)
    return packing_saving_pct(rate, rate.T)


def packing_saving_pct(rate_a: Floats, rate_b: Floats) -> Floats:
    """PS of two jobs that take equally long alone: the slower goes on alone when the faster is done."""
    fast, slow = np.maximum(rate_a, rate_b), np.minimum(rate_a, rate_b)
    return (1.0 - (1.0 / fast + 1.0 - slow / fast) / 2.0) * 100.0


def tercile_clusters(aggressor: Floats) -> Index:
    """Clusters of jobs without telemetry: light, middle and heavy thirds by how hard they press on others.

    Ties go by index.
    """
    order = np.argsort(np.argsort(aggressor, kind="stable"), kind="stable")
    return (order * 3 // len(aggressor)).astype(np.intp)
