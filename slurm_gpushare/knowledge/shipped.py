"""What is shipped: the V100's knowledge base and the paper's cluster model (docs/knowledge.md: how they were made)."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from slurm_gpushare.knowledge.clusters import ClusterModel
from slurm_gpushare.knowledge.kb import KnowledgeBase


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
