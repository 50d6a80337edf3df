"""The knowledge base of a GPU model: fitted from profiles and pairs, kept as JSON, asked for rates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.cells import Cell
from slurm_gpushare.knowledge.clusters import ClusterModel
from slurm_gpushare.knowledge.interference import COEFFICIENTS, Coefficients, Interference, Observed, Spread, Telemetry
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.rates import UNIT_SD, Floats, RateTable
from slurm_gpushare.knowledge.tables import PairTable, ProfileTable, write_text
from slurm_gpushare.protocol.errors import BadInput

FORMAT = 3


@dataclass(frozen=True, slots=True)
class Member:
    """A profile that the knowledge was fitted on, so that it is recognised when it comes again."""

    name: str
    busy: float | None
    access: float | None
    cluster: int


def _rows(value: Any) -> str:
    """JSON; of a list of lists or objects each on a line of its own."""
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(map(_rows, value)) + "\n]"
    return json.dumps(value, allow_nan=False)


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
        lines = ",\n".join(f"{json.dumps(name)}: {_rows(value)}" for name, value in self.to_json().items())
        write_text(path, f"{{\n{lines}\n}}\n")

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
            if coefficients.mean.shape != (COEFFICIENTS,) or coefficients.covariance.shape != (COEFFICIENTS,) * 2:
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

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"{self.gpu_model}, {self.source or 'of unknown source'}"

    def without_names(self) -> KnowledgeBase:
        """The same without who was measured: the names of profiles may tell what they are."""
        return replace(self, members=(), measured=())

    def knowledge(self) -> LearnedKnowledge:
        """Knowledge that starts from this base: telemetry tells it of tokens, observations refine it."""
        return LearnedKnowledge(self.interference)

    def predict(self, profiles: ProfileTable, observed: PairTable | None = None) -> RateTable:
        """Rates of every profile beside every other and beside its own kind, after what was observed among them."""
        if profiles.gpu_model.lower() != self.gpu_model.lower():
            raise BadInput(
                f"profiles of {profiles.gpu_model}, knowledge of {self.gpu_model}",
                "Rates of one GPU model say nothing about another: fit a knowledge base for it.",
            )
        jobs, names = telemetry(profiles), profiles.names
        known = self._known(names, jobs)
        knowledge = self.knowledge()
        knowledge.profiled(names, jobs)
        # What was measured of members counts again, but only among those asked for: the rest is in the coefficients.
        rows = [(known[v], known[n], rate) for v, n, rate in self.measured if v in known and n in known]
        if observed is not None:
            rows += rates_in(observed, {name: at for at, name in enumerate(names)})
        for victim, neighbour, rate in rows:
            knowledge.observe(names[victim], names[neighbour], rate, (UNIT_SD / self.interference.spread.noise) ** 2)
        if rows:
            knowledge.refit()
        return knowledge.rates(names, names)

    def _known(self, names: Sequence[str], jobs: Telemetry) -> dict[int, int]:
        """Member's index -> row, for profiles that the knowledge was fitted on: same name and same numbers."""
        row = {name: at for at, name in enumerate(names)}
        found = {}
        for index, member in enumerate(self.members):
            at = row.get(member.name)
            if at is not None and _same(member.busy, jobs.busy[at]) and _same(member.access, jobs.access[at]):
                found[index] = at
        return found


def telemetry(profiles: ProfileTable) -> Telemetry:
    """Shares of time; where only a maximum was measured it stands in for the mean."""
    busy, access = feature(profiles, "gpu_util_mean_pct"), feature(profiles, "mem_access_mean_pct")
    return Telemetry(busy / 100.0, access / 100.0, feature(profiles, "mem_used_pct") / 100.0)


def feature(profiles: ProfileTable, name: str) -> Floats:
    """A column that clusters are made of: telemetry, or the share of the card's memory that a job uses."""
    if name == "mem_used_pct":
        return profiles.column("mem_used_mib") / profiles.column("mem_total_mib") * 100.0
    column, maximum = profiles.column(name), {"gpu_util_mean_pct": "mgup", "mem_access_mean_pct": "mgtsamp"}.get(name)
    return column if maximum is None else np.where(np.isnan(column), profiles.column(maximum), column)


def fits_together(profiles: ProfileTable) -> NDArray[np.bool_]:
    """Whether the memory of every two profiles fits on one card; where it is not known nothing speaks against it."""
    used, total = profiles.column("mem_used_mib"), profiles.column("mem_total_mib")
    together = used[:, None] + used[None, :] > np.minimum(total[:, None], total[None, :])
    return np.asarray(~together)


def rates_in(pairs: PairTable, place: Mapping[str, int]) -> list[tuple[int, int, float]]:
    """(victim, neighbour, rate) by place: both directions of every feasible pair."""
    rows: list[tuple[int, int, float]] = []
    for a, b, rate_a, rate_b in zip(pairs.profile_a, pairs.profile_b, pairs.rate_a, pairs.rate_b, strict=True):
        if not np.isnan(rate_a):
            rows.append((place[a], place[b], float(rate_a)))
            rows.append((place[b], place[a], float(rate_b)))
    return rows


def observed_rates(rows: Sequence[tuple[int, int, float]], noise: float) -> Observed:
    """Rates by place as arrays, each with the same relative error."""
    return Observed(
        np.array([row[0] for row in rows], dtype=np.intp),
        np.array([row[1] for row in rows], dtype=np.intp),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.full(len(rows), noise),
    )


def _same(member: float | None, value: float) -> bool:
    return bool(np.isnan(value)) if member is None else abs(member - value) < 1e-6


# What is shipped: the V100's knowledge base and the paper's cluster model (docs/knowledge.md: how they were made).


@cache
def default_kb() -> KnowledgeBase:
    """From the 328 measured V100 pairs: ``gpushare kb fit --pairs v100_pairs.csv``."""
    return KnowledgeBase.from_json(json.loads(_text("v100_kb.json")), "the shipped knowledge base")


@cache
def default_model() -> ClusterModel:
    """From the paper's workloads: ``gpushare-lab characterize paper_workloads.csv``."""
    return ClusterModel.from_json(json.loads(_text("paper_model.json")))


def _text(name: str) -> str:
    return files("slurm_gpushare.knowledge").joinpath("data", name).read_text(encoding="utf-8")
