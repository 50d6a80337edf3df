"""Making a knowledge base from measured pairs: clusters and cells, and the interference model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge import empirical
from slurm_gpushare.knowledge.cells import make_cells, tercile_clusters
from slurm_gpushare.knowledge.clusters import ClusterModel, fit_clusters
from slurm_gpushare.knowledge.empirical import measured_noise
from slurm_gpushare.knowledge.interference import Interference, Observed, Spread, Telemetry, jobs_known
from slurm_gpushare.knowledge.kb import KnowledgeBase, Member, feature, observed_rates, rates_in, telemetry
from slurm_gpushare.knowledge.rates import Floats
from slurm_gpushare.knowledge.tables import PairTable, ProfileTable
from slurm_gpushare.protocol.errors import BadInput

UNTOLD = 0.5
"""The share of what tells jobs apart that is left when telemetry is known, where no pair with telemetry says."""
FROM_TELEMETRY = "k-means on telemetry"
FROM_RATES = "terciles of the mean aggressor effect (no telemetry)"


def fit(profiles: ProfileTable | None, pairs: PairTable, source: str = "", k: int | None = None) -> KnowledgeBase:
    """Learn a knowledge base from measured pairs, with the telemetry of who was measured where there is any."""
    if profiles is None:
        names = tuple(pairs.names)
        profiles = ProfileTable(names, ("",) * len(names), pairs.gpu_model, {})
    if profiles.gpu_model != pairs.gpu_model:
        raise BadInput(
            f"profiles of {profiles.gpu_model}, pairs of {pairs.gpu_model}", "Both must be of one GPU model."
        )
    place = {name: at for at, name in enumerate(profiles.names)}
    for name in pairs.names:
        if name not in place:
            raise BadInput(f"a pair of unknown profile '{name}'", "Every name of a pair needs its profile.")
    noise = measured_noise(list(_repeats(pairs)))
    seen = observed_rates(rates_in(pairs, place), noise)
    if len(seen.rate) < 2:
        raise BadInput("no pair was feasible", "There is nothing to learn from.")
    jobs = telemetry(profiles)
    general = Interference(spread=replace(Spread(), noise=noise))
    interference = empirical.fit(general, jobs, seen, _families(profiles))
    if not jobs_known(jobs).any():
        found, untold = interference.spread, math.sqrt(UNTOLD)
        told = replace(found, sensitivity=untold * found.unknown, pressure=untold * found.unknown)
        interference = replace(interference, spread=told)
    labels, model, how, count = _cluster(profiles, jobs, seen, k)
    log = np.maximum(seen.log_slowdown, 0.0)
    members = tuple(
        Member(name, _or_none(busy), _or_none(access), int(cluster))
        for name, busy, access, cluster in zip(profiles.names, jobs.busy, jobs.access, labels, strict=True)
    )
    measured = zip(seen.victim.tolist(), seen.neighbour.tolist(), seen.rate.tolist(), strict=True)
    cells = make_cells(count, labels[seen.victim], labels[seen.neighbour], log)
    return KnowledgeBase(
        pairs.gpu_model, interference, count, tuple(cells), how, model, members, tuple(measured), source
    )


def _families(profiles: ProfileTable) -> NDArray[np.intp] | None:
    """Who belongs to the same family, where the file says; a job without one is a family of its own."""
    if not any(profiles.groups):
        return None
    names = [group or f" {at}" for at, group in enumerate(profiles.groups)]
    return np.unique(names, return_inverse=True)[1].astype(np.intp)


def _repeats(pairs: PairTable) -> Iterator[Floats]:
    """Rates of the same job beside the same neighbour, where there are several."""
    found: dict[tuple[str, str], list[float]] = {}
    for a, b, rate_a, rate_b in zip(pairs.profile_a, pairs.profile_b, pairs.rate_a, pairs.rate_b, strict=True):
        if not np.isnan(rate_a):
            found.setdefault((a, b), []).append(float(rate_a))
            found.setdefault((b, a), []).append(float(rate_b))
    return (np.array(rates) for rates in found.values() if len(rates) > 1)


def _cluster(
    profiles: ProfileTable, jobs: Telemetry, seen: Observed, k: int | None
) -> tuple[NDArray[np.intp], ClusterModel | None, str, int]:
    if jobs_known(jobs).all() and len(profiles) >= 3:
        columns = {name: feature(profiles, name) for name in ("gpu_util_mean_pct", "mem_access_mean_pct")}
        share = feature(profiles, "mem_used_pct")
        if not np.isnan(share).any():
            columns["mem_used_pct"] = share
        values = np.column_stack(list(columns.values()))
        if len(np.unique(values, axis=0)) >= 3:
            model = fit_clusters(values, list(columns), k=k)
            return model.assign(values), model, FROM_TELEMETRY, model.k
    pressed = np.zeros(len(profiles))
    log = np.maximum(seen.log_slowdown, 0.0)
    for at in range(len(profiles)):
        mine = log[seen.neighbour == at]
        pressed[at] = mine.mean() if len(mine) else log.mean()
    return tercile_clusters(pressed), None, FROM_RATES, 3


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
