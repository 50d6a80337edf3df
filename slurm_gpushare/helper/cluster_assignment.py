"""The cluster of each profile: given when it is new, and all anew when a site fits a model of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.clusters import ClusterModel, fit_clusters
from slurm_gpushare.knowledge.kb import default_model
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.store.refine import by_nodes
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import Assignment, Profile

FULL_PROFILES = 10
"""A user's profiles beyond these add no weight: nobody can move the clusters by making many tokens."""
ENOUGH_PROFILES = 30
"""With fewer the shipped model says more than a model of one's own."""


@dataclass(frozen=True, slots=True)
class InForce:
    """A cluster model and the version under which profiles are tagged; 0 is the shipped one."""

    model: ClusterModel
    version: int = 0
    gpu_model: str = ""


def in_force(store: Store, gpu_model: str) -> InForce:
    """The model by which profiles of a GPU model are clustered now."""
    version, body = store.knowledge.clusters(gpu_model)
    return InForce(ClusterModel.from_json(body) if version else default_model(), version, gpu_model)


NewProfiles = tuple[list[Profile], list[Assignment]]
"""Profiles that are new or have changed, and their clusters."""


def assign_new(store: Store) -> NewProfiles:
    """Give every profile that is new or has changed its cluster."""
    waiting: dict[str, list[Profile]] = {}
    for profile in store.profiles.unassigned():
        waiting.setdefault(profile.gpu_model, []).append(profile)
    done: list[Assignment] = []
    for gpu_model, profiles in waiting.items():
        current = in_force(store, gpu_model)
        found = assignments(current.model, profiles)
        store.profiles.assign(found)
        done.extend(found)
    return [profile for profiles in waiting.values() for profile in profiles], done


def assignments(model: ClusterModel, profiles: list[Profile]) -> list[Assignment]:
    """Clusters of profiles. A feature that was not measured counts as average; without any there is no cluster."""
    values = feature_values(model.features, profiles)
    usable = ~np.isnan(values).all(axis=1)
    labels = model.assign(np.where(np.isnan(values), model.mean, values))
    return [
        Assignment(profile.token, profile.gpu_model, int(label))
        for profile, label, good in zip(profiles, labels.tolist(), np.atleast_1d(usable).tolist(), strict=True)
        if good
    ]


def refit(store: Store, gpu_model: str, k: int | None = None, enough: int = ENOUGH_PROFILES) -> InForce:
    """Fit a model on the store's own profiles and re-tag them, in one transaction; cluster numbers stay."""
    current = in_force(store, gpu_model)
    profiles = list(store.profiles.all(gpu_model))
    # Users' own records may refine a profile of theirs; what a cluster is, nodes alone say.
    values = feature_values(current.model.features, by_nodes(store.database, profiles))
    usable = ~np.isnan(values).any(axis=1) if profiles else np.zeros(0, dtype=bool)
    complete = values[usable]
    if len(complete) < enough:
        raise BadInput(
            f"{len(complete)} complete profiles of {gpu_model}, {enough} are needed",
            "Until then the model in force says more than one of so few.",
        )
    owners = [profiles[at].owner_uid for at in np.flatnonzero(usable).tolist()]
    model = fit_clusters(
        complete, current.model.features, k=k, previous=current.model, weights=np.array(user_weights(owners))
    )
    version = store.knowledge.save_clusters(gpu_model, model.to_json(), assignments(model, profiles))
    return InForce(model, version, gpu_model)


def user_weights(owners: Sequence[int]) -> list[float]:
    """How much each profile counts, given its owner: the profiles of one user together no more than `FULL_PROFILES`."""
    had = Counter(owners)
    return [min(1.0, FULL_PROFILES / had[uid]) for uid in owners]


def feature_values(features: tuple[str, ...], profiles: list[Profile]) -> NDArray[np.float64]:
    """Features by profile, NaN where not measured."""
    rows = [[profile.features.get(name, np.nan) for name in features] for profile in profiles]
    return np.array(rows, dtype=np.float64).reshape(len(profiles), len(features))
