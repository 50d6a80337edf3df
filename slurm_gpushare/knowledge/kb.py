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
from slurm_gpushare.knowledge.cells import Cell, cell_tables, towards_cells
from slurm_gpushare.knowledge.clusters import ClusterModel
from slurm_gpushare.knowledge.empirical import adapt
from slurm_gpushare.knowledge.files import Pairs, Profiles, write_text
from slurm_gpushare.knowledge.interference import (
    PESSIMISM,
    Coefficients,
    Interference,
    Observed,
    Spread,
    Telemetry,
    expected,
)
from slurm_gpushare.knowledge.posterior import Posterior
from slurm_gpushare.knowledge.rates import RateTable

Floats = NDArray[np.float64]

FORMAT = 2


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
    cell_share: float
    """How far towards the cell a prediction from telemetry is moved, 0..1."""
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
            "cell_share": self.cell_share,
            "model": self.model.to_json() if self.model else None,
            "coefficients": general.coefficients.mean.tolist(),
            "covariance": general.coefficients.covariance.tolist(),
            "spread": asdict(general.spread),
            "typical": list(general.typical),
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
            typical = float(body["typical"][0]), float(body["typical"][1]), float(body["typical"][2])
            general = Interference(coefficients, Spread(**body["spread"]), typical)
            if coefficients.mean.shape != (7,) or coefficients.covariance.shape != (7, 7):
                raise ValueError("coefficients of another shape")
            return cls(
                str(body["gpu_model"]),
                general,
                int(body["k"]),
                tuple(Cell(**cell) for cell in body["cells"]),
                float(body["cell_share"]),
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

    def predict(
        self, profiles: Profiles, observed: Pairs | None = None, model: ClusterModel | None = None
    ) -> RateTable:
        """Rates of every profile beside every other and beside its own kind, after what was observed among them.

        `model` finds the profiles' clusters where the base has no model of its own.
        """
        if profiles.gpu_model.lower() != self.gpu_model.lower():
            raise BadInput(
                f"profiles of {profiles.gpu_model}, knowledge of {self.gpu_model}",
                "Rates of one GPU model say nothing about another: fit a knowledge base for it.",
            )
        jobs = telemetry(profiles)
        known = self._known(profiles.names, jobs)
        place = {name: at for at, name in enumerate(profiles.names)}
        seen = self._measured_among(known)
        if observed is not None:
            seen = _joined(seen, rates_in(observed, place, self.interference.spread.noise))
        mean, cold = self.interference.cold(jobs, jobs)
        variance = cold
        if len(seen.rate):
            mean, variance = Posterior(adapt(self.interference, jobs, seen), jobs, seen).table()
        cells = cell_tables(self.cells, self.k, self._clusters(profiles, model, known))
        left = np.minimum(variance / cold, 1.0)  # of the doubt before observations; as it goes, so does the cell's say
        return expected(*towards_cells(mean, variance, *cells, self.cell_share * left), PESSIMISM)

    def _clusters(self, profiles: Profiles, model: ClusterModel | None, known: Mapping[int, int]) -> NDArray[np.intp]:
        """The cluster of each profile, -1 where nothing tells."""
        model = self.model or model
        clusters = np.full(len(profiles), -1, dtype=np.intp)
        if model is not None and model.k == self.k:
            clusters = model.assign(np.column_stack([feature(profiles, name) for name in model.features]))
        for index, row in known.items():
            clusters[row] = self.members[index].cluster
        return clusters

    def _known(self, names: Sequence[str], jobs: Telemetry) -> dict[int, int]:
        """Member's index -> row, for profiles that the knowledge was fitted on: same name and same numbers."""
        row = {name: at for at, name in enumerate(names)}
        found = {}
        for index, member in enumerate(self.members):
            at = row.get(member.name)
            if at is not None and _same(member.busy, jobs.busy[at]) and _same(member.access, jobs.access[at]):
                found[index] = at
        return found

    def _measured_among(self, known: Mapping[int, int]) -> Observed:
        """What was measured of the members counts again, but only among those asked for: the rest is in the model."""
        rows = [(known[v], known[n], rate) for v, n, rate in self.measured if v in known and n in known]
        return _rows(rows, self.interference.spread.noise)


def telemetry(profiles: Profiles) -> Telemetry:
    """Shares of time; where only a maximum was measured it stands in for the mean."""
    busy, access = feature(profiles, "gpu_util_mean_pct"), feature(profiles, "mem_access_mean_pct")
    return Telemetry(busy / 100.0, access / 100.0, feature(profiles, "mem_used_pct") / 100.0)


def feature(profiles: Profiles, name: str) -> Floats:
    """A column that clusters are made of: telemetry, or the share of the card's memory that a job uses."""
    if name == "mem_used_pct":
        return profiles.column("mem_used_mib") / profiles.column("mem_total_mib") * 100.0
    column, maximum = profiles.column(name), {"gpu_util_mean_pct": "mgup", "mem_access_mean_pct": "mgtsamp"}.get(name)
    return column if maximum is None else np.where(np.isnan(column), profiles.column(maximum), column)


def fits_together(profiles: Profiles) -> NDArray[np.bool_]:
    """Whether the memory of every two profiles fits on one card; where it is not known nothing speaks against it."""
    used, total = profiles.column("mem_used_mib"), profiles.column("mem_total_mib")
    together = used[:, None] + used[None, :] > np.minimum(total[:, None], total[None, :])
    return np.asarray(~together)


def rates_in(pairs: Pairs, place: Mapping[str, int], noise: float) -> Observed:
    """Both directions of every feasible pair."""
    rows: list[tuple[int, int, float]] = []
    for a, b, rate_a, rate_b in zip(pairs.profile_a, pairs.profile_b, pairs.rate_a, pairs.rate_b, strict=True):
        if not np.isnan(rate_a):
            rows.append((place[a], place[b], float(rate_a)))
            rows.append((place[b], place[a], float(rate_b)))
    return _rows(rows, noise)


def _rows(rows: Sequence[tuple[int, int, float]], noise: float) -> Observed:
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


def _same(member: float | None, value: float) -> bool:
    return bool(np.isnan(value)) if member is None else abs(member - value) < 1e-6
