"""What decides in the simulated cluster, and the plain queue, which is what Slurm does without us."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from slurm_gpushare.simulate.whole_gpus import start_whole
from slurm_gpushare.simulate.workload import Ints, SimulatedJobs
from slurm_gpushare.simulate.world import World


class Policy(ABC):
    """What decides at each instant, once all that ended or arrived then is booked."""

    def __init__(self, work: SimulatedJobs, seed: int = 0) -> None:
        self.by_submit: Ints = np.arange(work.jobs)
        self.by_duration: Ints = np.argsort(work.duration_s, kind="stable")

    @abstractmethod
    def schedule(self, world: World) -> None:
        """Start (or stop) jobs."""

    def wake_s(self, world: World) -> float:
        """When it wants to look again even if nothing happens."""
        return np.inf


class Fifo(Policy):
    """The plain queue."""

    def schedule(self, world: World) -> None:
        start_whole(world, self.by_submit)
