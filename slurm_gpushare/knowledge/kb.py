"""The knowledge base of a GPU model: fitted from profiles and pairs, kept as JSON, asked for rates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.cells import Cell, make_cells, tercile_clusters
from slurm_gpushare.knowledge.clusters import ClusterModel, fit_clusters
from slurm_gpushare.knowledge.files import Pairs, Profiles, write_text
from slurm_gpushare.knowledge.interference import (
    Coefficients,
    Interference,
    Observed,
    Posterior,
    Spread,
    Telemetry,
    jobs_known,
)
from slurm_gpushare.knowledge.rates import RateTable

Floats = NDArray[np.float64]

FORMAT = 1
FROM_TELEMETRY = "k-means on telemetry"
FROM_RATES = "terciles of the mean aggressor effect (no telemetry)"


@dataclass(frozen=True, slots=True)
class Member:
    """A profile that the knowledge was fitted on, so that it is recognised when it comes again."""

    name: str
    busy: float | None
    access: float | None
    cluster: int


@dataclass(frozen=True, slots=True)
class KnowledgeBase:
    """What is known of one GPU model's jobs."""

    gpu_model: str
    interference: Interference
    k: int
    cells: tuple[Cell, ...]
    clusters_from: str
    model: ClusterModel | None
    """None where the profiles had no telemetry to cluster."""
    members: tuple[Member, ...]
    measured: tuple[tuple[int, int, float], ...]
    """(victim, neighbour, rate) by index of member."""
    source: str

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        general = self.interference
        return {
            "format": FORMAT,
            "gpu_model": self.gpu_model,
            "source": self.source,
            "clusters_from": self.clusters_from,
            "k": self.k,
            "cells": [asdict(cell) for cell in self.cells],
            "model": self.model.to_json() if self.model else None,
            "coefficients": general.coefficients.mean.tolist(),
            "covariance": general.coefficients.covariance.tolist(),
            "spread": asdict(general.spread),
            "typical": list(general.typical),
            "unknown": general.unknown,
            "members": [asdict(member) for member in self.members],
            "measured": [list(row) for row in self.measured],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = "knowledge base") -> KnowledgeBase:
        """Read what `to_json` wrote; anything else is refused, named after `where`."""
        try:
            if body["format"] != FORMAT:
                raise BadInput(f"{where}: of format {body['format']}", f"This release reads format {FORMAT}.")
            coefficients = Coefficients(np.array(body["coefficients"], float), np.array(body["covariance"], float))
            typical = float(body["typical"][0]), float(body["typical"][1])
            general = Interference(coefficients, Spread(**body["spread"]), typical, float(body["unknown"]))
            if coefficients.mean.shape != (5,) or coefficients.covariance.shape != (5, 5):
                raise ValueError("coefficients of another shape")
            return cls(
                str(body["gpu_model"]),
                general,
                int(body["k"]),
                tuple(Cell(**cell) for cell in body["cells"]),
                str(body["clusters_from"]),
                ClusterModel.from_json(body["model"]) if body["model"] else None,
                tuple(Member(**member) for member in body["members"]),
                tuple((int(v), int(n), float(rate)) for v, n, rate in body["measured"]),
                str(body["source"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadInput(f"{where}: not a knowledge base: {error!r}", "Write one with 'gpushare kb fit'.") from error

    @classmethod
    def load(cls, path: Path) -> KnowledgeBase:
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadInput(f"{path}: not JSON: {error}", "Write one with 'gpushare kb fit'.") from error
        if not isinstance(body, dict):
            raise BadInput(f"{path}: not a knowledge base", "Write one with 'gpushare kb fit'.")
        return cls.from_json(body, str(path))

    def predict(self, profiles: Profiles, observed: Pairs | None = None) -> RateTable:
        """Rates of every profile beside every other and beside its own kind, after what was observed among them."""
        if profiles.gpu_model.lower() != self.gpu_model.lower():
            raise BadInput(
                f"profiles of {profiles.gpu_model}, knowledge of {self.gpu_model}",
                "Rates of one GPU model say nothing about another: fit a knowledge base for it.",
            )
        jobs = telemetry(profiles)
        place = {name: at for at, name in enumerate(profiles.names)}
        seen = _observed(observed, place, self.interference.spread.noise) if observed is not None else None
        known = self._known(profiles.names, jobs)
        if known:
            return self._with_members(jobs, seen, known)
        if seen is None or not len(seen.rate):
            return self.interference.rates(jobs, jobs)
        return Posterior(self.interference, jobs, seen).rates()

    def _known(self, names: Sequence[str], jobs: Telemetry) -> dict[int, int]:
        """Member's index -> row, for profiles that the knowledge was fitted on: same name and same numbers."""
        row = {name: at for at, name in enumerate(names)}
        found = {}
        for index, member in enumerate(self.members):
            at = row.get(member.name)
            if at is not None and _same(member.busy, jobs.busy[at]) and _same(member.access, jobs.access[at]):
                found[index] = at
        return found

    def _with_members(self, jobs: Telemetry, seen: Observed | None, known: dict[int, int]) -> RateTable:
        """What was measured of the members counts again, but only among those asked for: the rest is in the model."""
        rows = [(known[v], known[n], rate) for v, n, rate in self.measured if v in known and n in known]
        noise = self.interference.spread.noise
        own = Observed(
            np.array([row[0] for row in rows], dtype=np.intp),
            np.array([row[1] for row in rows], dtype=np.intp),
            np.array([row[2] for row in rows], dtype=np.float64),
            np.full(len(rows), noise),
        )
        everything = own if seen is None else _joined(own, seen)
        return Posterior(self.interference, jobs, everything).rates()


def fit(profiles: Profiles | None, pairs: Pairs, source: str = "", k: int | None = None) -> KnowledgeBase:
    """Learn a knowledge base from measured pairs, with the telemetry of who was measured where there is any."""
    if profiles is None:
        names = tuple(pairs.names)
        profiles = Profiles(names, ("",) * len(names), pairs.gpu_model, {})
    if profiles.gpu_model != pairs.gpu_model:
        raise BadInput(
            f"profiles of {profiles.gpu_model}, pairs of {pairs.gpu_model}", "Both must be of one GPU model."
        )
    place = {name: at for at, name in enumerate(profiles.names)}
    for name in pairs.names:
        if name not in place:
            raise BadInput(f"a pair of unknown profile '{name}'", "Every name of a pair needs its profile.")
    seen = _observed(pairs, place, Spread().noise)
    if len(seen.rate) < 2:
        raise BadInput("no pair was feasible", "There is nothing to learn from.")
    jobs = telemetry(profiles)
    interference = Interference().fit(jobs, seen)
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


def telemetry(profiles: Profiles) -> Telemetry:
    """Shares of time; where only a maximum was measured it stands in for the mean."""
    busy, access = profiles.column("gpu_util_mean_pct"), profiles.column("mem_access_mean_pct")
    busy = np.where(np.isnan(busy), profiles.column("mgup"), busy)
    access = np.where(np.isnan(access), profiles.column("mgtsamp"), access)
    return Telemetry(busy / 100.0, access / 100.0)


def fits_together(profiles: Profiles) -> NDArray[np.bool_]:
    """Whether the memory of every two profiles fits on one card; where it is not known nothing speaks against it."""
    used, total = profiles.column("mem_used_mib"), profiles.column("mem_total_mib")
    together = used[:, None] + used[None, :] > np.minimum(total[:, None], total[None, :])
    return np.asarray(~together)


def _cluster(
    profiles: Profiles, jobs: Telemetry, seen: Observed, k: int | None
) -> tuple[NDArray[np.intp], ClusterModel | None, str, int]:
    if jobs_known(jobs).all() and len(profiles) >= 3:
        columns = {"gpu_util_mean_pct": jobs.busy * 100.0, "mem_access_mean_pct": jobs.access * 100.0}
        share = profiles.column("mem_used_mib") / profiles.column("mem_total_mib") * 100.0
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


def _observed(pairs: Pairs, place: Mapping[str, int], noise: float) -> Observed:
    """Both directions of every feasible pair."""
    rows: list[tuple[int, int, float]] = []
    for a, b, rate_a, rate_b in zip(pairs.profile_a, pairs.profile_b, pairs.rate_a, pairs.rate_b, strict=True):
        if not np.isnan(rate_a):
            rows.append((place[a], place[b], float(rate_a)))
            rows.append((place[b], place[a], float(rate_b)))
    return Observed(
        np.array([row[0] for row in rows], dtype=np.intp),
        np.array([row[1] for row in rows], dtype=np.intp),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.full(len(rows), noise),
    )


def _joined(first: Observed, second: Observed) -> Observed:
    return Observed(
        np.concatenate([first.victim, second.victim]),
        np.concatenate([first.neighbour, second.neighbour]),
        np.concatenate([first.rate, second.rate]),
        np.concatenate([first.noise, second.noise]),
    )


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _same(member: float | None, value: float) -> bool:
    return bool(np.isnan(value)) if member is None else abs(member - value) < 1e-6
