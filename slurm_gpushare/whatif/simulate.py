"""What decides in the simulated cluster, and the plain queue, which is what Slurm does without us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from slurm_gpushare.knowledge.rates import Ints
from slurm_gpushare.whatif.card_allocation import start_whole
from slurm_gpushare.whatif.jobs import SimulatedJobs
from slurm_gpushare.whatif.world import SAME_INSTANT_S, World


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


# Run one policy on one workload.


def run(
    work: SimulatedJobs, policy: Policy, progress: Callable[[int], None] | None = None, world: World | None = None
) -> World:
    """Simulate until the last job ends; `progress` is told of each batch of jobs that ended.

    On one thread: sums of several threads differ in their last digit, and a choice that hangs on it changes the run.
    """
    with threadpool_limits(1):
        return _run(work, policy, progress, world or World(work))


def _run(work: SimulatedJobs, policy: Policy, progress: Callable[[int], None] | None, world: World) -> World:
    submit_s = work.submit_s.tolist()
    arrived = ended = 0
    while ended < work.jobs:
        next_submit_s = submit_s[arrived] if arrived < work.jobs else np.inf
        world.now_s = max(world.now_s, min(next_submit_s, world.next_end_s(), policy.wake_s(world)))
        if world.now_s == np.inf:
            raise RuntimeError("the policy leaves jobs waiting for ever")
        done = len(world.finish_due())
        while arrived < work.jobs and submit_s[arrived] <= world.now_s + SAME_INSTANT_S:
            world.waiting[arrived] = True
            arrived += 1
        ended += done
        if progress is not None and done:
            progress(done)
        policy.schedule(world)
    return world
