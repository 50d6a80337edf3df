"""The paper's figure 5: what clusters do to each other, as this site has seen it and as the base in force has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.coschedule.pairs.cluster_tags import in_force
from slurm_gpushare.coschedule.pairs.learner import Learner
from slurm_gpushare.knowledge.cells import Cell, believed_cells, isd_matrix, ps_matrix
from slurm_gpushare.knowledge.kb import KnowledgeBase
from slurm_gpushare.store.store import Store


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
