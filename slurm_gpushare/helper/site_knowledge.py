"""What the helper knows of each GPU model that shares: one learner a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.helper.cluster_assignment import assign_new, in_force
from slurm_gpushare.helper.learner import Learner, base_in_force
from slurm_gpushare.knowledge.cells import Cell, believed_cells, isd_matrix, ps_matrix
from slurm_gpushare.knowledge.kb import KnowledgeBase
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import models_of


class SiteKnowledge(KnowledgeByModel):
    """The learners of the site's models, by the cards' own names of them."""

    def __init__(self, store: Store, site_models: Sequence[str], *, writes: bool = True) -> None:
        """`writes`: False for a dry run, in which nothing is added to the store."""
        self._store = store
        self._writes = writes
        self._learners: dict[str, Learner] = {}
        self.site_models = site_models

    @property
    def learners(self) -> list[Learner]:
        """Of the site's models, in the order of gpushare.conf, and of those of them that were met under MPS."""
        models = models_of(self._store.database, self.site_models).values()
        return [self._learner(model) for model in dict.fromkeys((*models, *self._learners))]

    @property
    def titles(self) -> str:
        """The knowledge bases from which they start."""
        return "; ".join(f"{learner.gpu_model}: {learner.base.title}" for learner in self.learners)

    def take_bases(self) -> bool:
        """Start anew from the knowledge bases that were put in force since (``kb use``); whether there was one.

        What was learned of tokens is in the store, and is learned again on top of the new base.
        """
        bases = {model: base_in_force(self._store, model) for model in self._learners}
        changed = [model for model, base in bases.items() if base.to_json() != self._learners[model].base.to_json()]
        for model in changed:
            del self._learners[model]
        return bool(changed)

    def on(self, gpu_model: str) -> Knowledge:
        return self._learner(gpu_model).knowledge

    def catch_up(self) -> int:
        """Take in new profiles and what was observed since; returns how many observations."""
        new = assign_new(self._store) if self._writes else ([], [])
        return sum(learner.catch_up(new) for learner in self.learners)

    def _learner(self, gpu_model: str) -> Learner:
        """The model's learner; one that nobody asked for until now has read all that there is."""
        if gpu_model not in self._learners:
            self._learners[gpu_model] = Learner(self._store, gpu_model, writes=self._writes)
            self._learners[gpu_model].catch_up()
        return self._learners[gpu_model]


# The paper's figure 5: what clusters do to each other, as this site has seen it and as the base in force has it.


@dataclass(frozen=True, slots=True)
class Figure5:
    """ISD and PS by cluster, with the evidence."""

    gpu_model: str
    source: str
    clusters_from: str
    k: int
    cells: Sequence[Cell]
    evidence: int
    """A cell with fewer rates seen is left blank."""

    @property
    def title(self) -> str:
        return f"{self.gpu_model}, {self.source}"

    def isd(self) -> NDArray[np.float64]:
        return isd_matrix(self.cells, self.k, self.evidence)

    def ps(self) -> NDArray[np.float64]:
        return ps_matrix(self.cells, self.k, self.evidence)


def of_base(base: KnowledgeBase) -> Figure5:
    """As a knowledge base has it."""
    return Figure5(base.gpu_model, base.source or "of unknown source", base.clusters_from, base.k, base.cells, 1)


def of_site(store: Store, gpu_model: str) -> list[Figure5]:
    """As this site's tokens have it, where there are any, and then as the base has it that they started from."""
    learner = Learner(store, gpu_model, writes=False)
    learner.catch_up()
    base = of_base(learner.base)
    if not learner.clusters:
        return [base]
    model = in_force(store, gpu_model)
    cells = believed_cells(model.model.k, learner.clusters, learner.knowledge)
    source = f"this site: {learner.knowledge.observations} observations of {len(learner.clusters)} tokens"
    how = "k-means on telemetry, " + (f"model {model.version}" if model.version else "the shipped model")
    return [Figure5(gpu_model, source, how, model.model.k, cells, 0), base]
