"""How the rest of the package asks "how fast does this job run beside that one?"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Index = NDArray[np.intp]

UNIT_SD = 0.05
"""The relative error (standard deviation) of an observed rate of weight 1."""


@dataclass(frozen=True, slots=True)
class RateTable:
    """Directional rates: row i is the victim, column j its neighbour. 1 means not slowed at all."""

    mean: Floats
    low: Floats
    """The pessimistic end of the interval: promises are kept on this one."""


class Knowledge(Protocol):
    """What predicts rates, and learns from the rates that were seen."""

    def rates(self, victims: Sequence[str], neighbours: Sequence[str]) -> RateTable:
        """The rates of every victim beside every neighbour, by token."""

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None:
        """Take in that `victim` ran at `rate` beside `neighbour`.

        `weight` is how much the observation is worth: 1 where its relative error is `UNIT_SD`, else the square of
        `UNIT_SD` over its relative error.
        """


class KnowledgeByModel(ABC):
    """What is known of each GPU model: rates of one say nothing about another."""

    @abstractmethod
    def on(self, gpu_model: str) -> Knowledge:
        """The knowledge of one model."""


def known_on(knowledge: Knowledge | KnowledgeByModel, gpu_model: str) -> Knowledge:
    """The knowledge of a GPU model; where there is only one model there is only one knowledge."""
    return knowledge.on(gpu_model) if isinstance(knowledge, KnowledgeByModel) else knowledge
