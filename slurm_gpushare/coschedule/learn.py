"""What the helper knows of rates and clusters: brought up to date from the store after each ingest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.config import Config
from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.clusters import ClusterModel, fit_clusters
from slurm_gpushare.knowledge.default import default_kb, default_model
from slurm_gpushare.knowledge.kb import KnowledgeBase
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.prior import CellPrior
from slurm_gpushare.knowledge.rates import UNIT_SD
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import Assignment, Profile

ENOUGH_PROFILES = 30
"""With fewer the shipped model says more than a model of one's own."""
DURATION_SD = 0.1
"""How far two runs of the same job differ, relative: what an observation from elapsed times is worth."""


@dataclass(frozen=True, slots=True)
class InForce:
    """A cluster model and the version under which profiles are tagged; 0 is the shipped one."""

    model: ClusterModel
    version: int = 0
    gpu_model: str = ""


@dataclass
class Learner:
    """Keeps `knowledge` in step with the profiles and observations in the store."""

    store: Store
    base: KnowledgeBase = field(default_factory=default_kb)
    writes: bool = True
    """False for a dry run: nothing is added to the store."""
    _last_observation: int = 0
    _last_run: int = 0

    def __post_init__(self) -> None:
        self.prior = CellPrior(self.base)
        self.knowledge = LearnedKnowledge(self.prior)
        for profile in self.store.profiles.all():
            self.prior.cluster_of[profile.token] = profile.cluster

    def catch_up(self, config: Config | None = None) -> int:
        """Give new profiles their cluster and take in what was observed since; returns how many observations."""
        if self.writes:
            for assigned in assign_new(self.store):
                self.prior.cluster_of[assigned.token] = assigned.cluster
            self._last_run = max(self._elapsed(), default=self._last_run)
        count = 0
        while new := self.store.observations.after(self._last_observation):
            for item in new:
                if item.victim and item.neighbour:
                    self.knowledge.observe(item.victim, item.neighbour, item.rate, item.weight)
            self._last_observation = new[-1].id
            count += len(new)
        return count

    def _elapsed(self) -> Iterator[int]:
        """Turn runs that ended into observations; yields how far it came."""
        for run in list(self.store.runs.after(self._last_run)):
            if run.shared_s > 0.0:
                self.store.observations.add(list(elapsed_observations(self.store, run.id, run.token)))
            yield run.settled_seq


def elapsed_observations(store: Store, run_id: int, token: str) -> Iterable[Observation]:
    """What a shared run's elapsed time says, given how long the token takes alone.

    alone + rate x shared = time alone. Only runs with one neighbour tell whose doing it was; a job that was stopped
    early would seem to have run faster than alone, and tells nothing.
    """
    record, profile = store.runs.record(run_id), store.profiles.get(token)
    if record is None or profile is None or profile.duration_s is None or len(record.neighbours) != 1:
        return
    others = {run.token for run in store.runs.of_job(record.neighbours[0].job_id)}
    if len(others) != 1 or record.shared_s < 0.2 * profile.duration_s:
        return
    rate = (profile.duration_s - record.alone_s) / record.shared_s
    if not 0.05 < rate <= 1.2:
        return
    error = DURATION_SD * profile.duration_s / record.shared_s / rate
    weight = min(1.0, (UNIT_SD / error) ** 2)
    source = f"elapsed:{record.run_id}"
    yield Observation(source, profile.gpu_model, token, others.pop(), min(rate, 1.0), weight, int(record.end_s))


def in_force(store: Store, gpu_model: str) -> InForce:
    """The model by which profiles of a GPU model are clustered now."""
    stored = store.models.latest(gpu_model)
    if stored is None:
        return InForce(default_model(), 0, gpu_model)
    return InForce(ClusterModel.from_json(stored.body), stored.version, gpu_model)


def assign_new(store: Store) -> list[Assignment]:
    """Give every profile that is new or has changed its cluster."""
    waiting: dict[str, list[Profile]] = {}
    for profile in store.profiles.unassigned():
        waiting.setdefault(profile.gpu_model, []).append(profile)
    done: list[Assignment] = []
    for gpu_model, profiles in waiting.items():
        current = in_force(store, gpu_model)
        found = assignments(current.model, profiles)
        store.profiles.assign(found, current.version)
        done.extend(found)
    return done


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
    values = feature_values(current.model.features, profiles)
    complete = values[~np.isnan(values).any(axis=1)] if profiles else values
    if len(complete) < enough:
        raise BadInput(
            f"{len(complete)} complete profiles of {gpu_model}, {enough} are needed",
            "Until then the model in force says more than one of so few.",
        )
    model = fit_clusters(complete, current.model.features, k=k, previous=current.model)
    version = store.models.save(gpu_model, model.to_json(), assignments(model, profiles))
    return InForce(model, version, gpu_model)


def feature_values(features: tuple[str, ...], profiles: list[Profile]) -> NDArray[np.float64]:
    """Features by profile, NaN where not measured."""
    rows = [[profile.features.get(name, np.nan) for name in features] for profile in profiles]
    return np.array(rows, dtype=np.float64).reshape(len(profiles), len(features))
