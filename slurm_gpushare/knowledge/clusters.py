"""Clusters of profiles: K-means finds them, the elbow says how many, plain numpy assigns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.rates import Floats
from slurm_gpushare.protocol.errors import BadInput

FORMAT = 1
MAX_K = 8


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """Centroids in the units of the features, and the scale in which distance is measured."""

    features: tuple[str, ...]
    mean: Floats
    scale: Floats
    centroids: Floats
    """One row a cluster, lightest first unless numbers were kept from an earlier model."""
    sizes: tuple[int, ...]
    chosen: str
    """How k was chosen: ``elbow`` or ``given``."""
    distortions: tuple[float, ...] = ()
    """Sum of squared distances for k = 1, 2, ...: what the elbow was found on."""

    @property
    def k(self) -> int:
        return len(self.centroids)

    def assign(self, values: Floats) -> NDArray[np.intp]:
        """The cluster of each row; -1 where a feature is not known."""
        points = (np.asarray(values, dtype=np.float64) - self.mean) / self.scale
        centres = (self.centroids - self.mean) / self.scale
        distance = np.square(centres).sum(axis=1) - 2.0 * points @ centres.T
        nearest = np.argmin(distance, axis=1)
        return np.where(np.isnan(points).any(axis=1), -1, nearest).astype(np.intp)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "features": list(self.features),
            "mean": self.mean.tolist(),
            "scale": self.scale.tolist(),
            "centroids": self.centroids.tolist(),
            "sizes": list(self.sizes),
            "chosen": self.chosen,
            "distortions": list(self.distortions),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ClusterModel:
        """Read what `to_json` wrote; anything else is refused."""
        try:
            if body["format"] != FORMAT:
                raise BadInput(f"cluster model of format {body['format']}", f"This release reads format {FORMAT}.")
            model = cls(
                tuple(body["features"]),
                np.asarray(body["mean"], dtype=np.float64),
                np.asarray(body["scale"], dtype=np.float64),
                np.asarray(body["centroids"], dtype=np.float64),
                tuple(int(size) for size in body["sizes"]),
                str(body["chosen"]),
                tuple(float(value) for value in body["distortions"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a cluster model: {error!r}", "Write one with 'gpushare kb clusters fit'.") from error
        width = len(model.features)
        if model.centroids.ndim != 2 or model.centroids.shape[1] != width or not len(model.centroids) or not width:
            raise BadInput("not a cluster model: centroids do not fit its features")
        return model


def fit_clusters(
    values: Floats,
    features: Sequence[str],
    k: int | None = None,
    previous: ClusterModel | None = None,
    seed: int = 0,
    weights: Floats | None = None,
) -> ClusterModel:
    """Cluster rows; `k` by the elbow unless given. Numbers follow `previous` where it has the same features and k.

    `weights` say how much each row counts, all alike unless given.
    """
    values = np.asarray(values, dtype=np.float64)
    if np.isnan(values).any():
        raise BadInput("a profile to cluster lacks a feature", f"All of {', '.join(features)} are needed.")
    distinct = len(np.unique(values, axis=0))
    if distinct < 2:
        raise BadInput(
            f"{len(values)} profiles, {distinct} different", "Clusters need at least two different profiles."
        )
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    mean, scale = mean_and_scale(values, weights)
    points = (values - mean) / scale
    most = min(MAX_K, distinct)
    if k is not None and not 1 <= k <= most:
        raise BadInput(f"k = {k} clusters of {distinct} different profiles", f"Choose k between 1 and {most}.")
    fits = {n: k_means(points, n, seed, weights) for n in (range(1, most + 1) if k is None else (k,))}
    distortions = tuple(fits[n][1] for n in fits) if k is None else ()
    best = k if k is not None else elbow(distortions)
    labels = fits[best][0]
    members = [labels == label for label in range(best)]
    centroids = np.array([np.average(values[own], axis=0, weights=weights[own]) for own in members])
    order = np.argsort(((centroids - mean) / scale).sum(axis=1))
    if previous is not None and previous.features == tuple(features) and previous.k == best:
        order = _matched(centroids, previous)
    sizes = tuple(int((labels == label).sum()) for label in order)
    return ClusterModel(
        tuple(features), mean, scale, centroids[order], sizes, "elbow" if k is None else "given", distortions
    )


def mean_and_scale(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Of each column. A constant one is left at scale 1, where it adds nothing to any distance."""
    mean = np.average(values, axis=0, weights=weights)
    scale = np.sqrt(np.average(np.square(values - mean), axis=0, weights=weights))
    return np.asarray(mean, dtype=np.float64), np.where(scale > 1e-9, scale, 1.0)


def elbow(distortions: Sequence[float]) -> int:
    """The k after which more clusters gain little: furthest below the line from the first to the last distortion."""
    if len(distortions) < 3:
        return len(distortions)
    x = np.linspace(0.0, 1.0, len(distortions))
    fall = np.asarray(distortions)
    span = fall[0] - fall[-1]
    y = (fall - fall[-1]) / span if span > 0.0 else np.zeros_like(fall)
    return int(np.argmax(1.0 - x - y)) + 1


def k_means(points: Floats, k: int, seed: int, weights: Floats | None = None) -> tuple[NDArray[np.intp], float]:
    from sklearn.cluster import KMeans

    fitted = KMeans(n_clusters=k, n_init=10, random_state=seed).fit(points, sample_weight=weights)
    return np.asarray(fitted.labels_, dtype=np.intp), float(fitted.inertia_)


def _matched(centroids: Floats, previous: ClusterModel) -> NDArray[np.intp]:
    """The order of `centroids` in which each is as near as can be to the old one of its number."""
    from scipy.optimize import linear_sum_assignment

    new, old = centroids / previous.scale, previous.centroids / previous.scale
    distance = np.square(old[:, None, :] - new[None, :, :]).sum(axis=2)
    return np.asarray(linear_sum_assignment(distance)[1], dtype=np.intp)
