"""The paper's characterisation from end to end: rank, enlarge, cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpushare_lab.paper.ranking import Ranked, rank
from gpushare_lab.paper.workloads import FEATURES, TARGETS, PaperWorkloads, Rebuilt, enlarge, read_workloads, score
from slurm_gpushare.knowledge.clusters import ClusterModel, elbow, fit_clusters, k_means, mean_and_scale

Floats = NDArray[np.float64]

THIRD = "mgtsamp"
"""The feature besides the two targets: it was chosen on the ranking for MGUP."""
INTERPOLATION = "pchip"
"""Polynomials give their own points back perfectly and overshoot between them; of the methods that never leave the
range of the two neighbouring measurements this one has the least error."""


MOST_TRIED_K = 13


@dataclass(frozen=True, slots=True)
class ChoiceOfK:
    """How far the number of clusters depends on how it is chosen."""

    elbows: Mapping[int, int]
    """The elbow by the largest k that was tried."""
    silhouettes: Mapping[int, float]
    """Mean silhouette by k: how much nearer points lie to their own cluster than to the next; 1 at best."""


def choice_of_k(values: Floats, seed: int) -> ChoiceOfK:
    """The elbow for every largest k from 5 to `MOST_TRIED_K`, and the silhouette of every k, on standardised values."""
    from sklearn.metrics import silhouette_score

    mean, scale = mean_and_scale(values, np.ones(len(values)))
    points = (values - mean) / scale
    most = min(MOST_TRIED_K, len(np.unique(values, axis=0)) - 1)
    fits = {k: k_means(points, k, seed) for k in range(1, most + 1)}
    distortions = [fits[k][1] for k in fits]
    silhouettes = {k: float(silhouette_score(points, fits[k][0])) for k in fits if k > 1}
    return ChoiceOfK({largest: elbow(distortions[:largest]) for largest in range(5, most + 1)}, silhouettes)


@dataclass(frozen=True, slots=True)
class Characterisation:
    """Everything that figures 2 to 4 show."""

    workloads: PaperWorkloads
    rankings: dict[str, list[Ranked]]
    methods: list[Rebuilt]
    method: str
    points: Floats
    """Measured rows, then synthetic ones; columns as in `FEATURES`."""
    model: ClusterModel
    labels: NDArray[np.intp]
    choice: ChoiceOfK

    def place_of_third(self, target: str) -> int:
        """The place of the third feature in the ranking for `target`, 1 being the most telling."""
        names = [item.attribute for item in self.rankings[target]]
        return names.index(FEATURES[THIRD]) + 1

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        return {
            "k": self.model.k,
            "k_chosen_by": self.model.chosen,
            "centroids": [
                {**{name: round(float(value), 2) for name, value in zip(FEATURES, row, strict=True)}, "size": size}
                for row, size in zip(self.model.centroids, self.model.sizes, strict=True)
            ],
            "third_feature": {
                "name": THIRD,
                "place": {target: self.place_of_third(target) for target in self.rankings},
                "chosen_on": "MGUP",
            },
            "elbow_by_largest_k": dict(self.choice.elbows),
            "silhouette_by_k": {k: round(value, 3) for k, value in self.choice.silhouettes.items()},
            "distortions": [round(value, 3) for value in self.model.distortions],
            "workloads": len(self.workloads.values),
            "points": len(self.points),
            "interpolation": self.method,
            "interpolation_scores": [asdict(item) for item in self.methods],
            "dropped_sensitive": list(self.workloads.dropped),
            "dropped_constant": list(self.workloads.constant),
            "ranking": {
                target: [
                    {"attribute": item.attribute, "mean_rank": item.mean_rank, "spread": round(item.spread, 3)}
                    for item in items
                ]
                for target, items in self.rankings.items()
            },
        }


def characterize(path: Path, k: int | None = None, method: str = INTERPOLATION, seed: int = 0) -> Characterisation:
    """Run the paper's pipeline on its table of workloads."""
    workloads = read_workloads(path)
    measured = np.column_stack([workloads.column(name) for name in FEATURES.values()])
    points = np.vstack([measured, enlarge(workloads, method)[0]])
    model = fit_clusters(points, list(FEATURES), k=k, seed=seed)
    return Characterisation(
        workloads,
        {target: rank(workloads.attributes, workloads.values, target, seed) for target in TARGETS},
        score(workloads),
        method,
        points,
        model,
        model.assign(points),
        choice_of_k(points, seed=seed),
    )
