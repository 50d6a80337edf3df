"""Which attributes tell of GPU utilisation and memory: four methods, ranked and compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ranked:
    """An attribute's place among all, 1 being the most telling."""

    attribute: str
    mean_rank: float
    spread: float
    """Standard deviation over the methods: how far they agree."""


def rank(attributes: tuple[str, ...], values: Floats, target: str, seed: int = 0) -> list[Ranked]:
    """Attributes by how much each method uses them to explain `target`, best first."""
    from scipy.stats import rankdata
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import Lasso, Ridge

    at = attributes.index(target)
    y = values[:, at]
    others = [name for name in attributes if name != target]
    x = np.delete(values, at, axis=1)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    scaled = (y - y.mean()) / y.std()
    forest = RandomForestRegressor(n_estimators=100, random_state=seed, n_jobs=1).fit(x, y)
    weights = (
        np.abs(x.T @ scaled) / len(y),
        forest.feature_importances_,
        np.abs(Ridge(alpha=1.0).fit(x, scaled).coef_),
        np.abs(Lasso(alpha=0.01, max_iter=50_000).fit(x, scaled).coef_),
    )
    ranks = np.column_stack([rankdata(-weight) for weight in weights])
    found = [Ranked(name, float(row.mean()), float(row.std())) for name, row in zip(others, ranks, strict=True)]
    return sorted(found, key=lambda item: (item.mean_rank, item.attribute))
