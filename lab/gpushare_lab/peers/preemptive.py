"""Peers that give every job a card of its own, in an order that Slurm does not know: sjf, srpt and tiresias."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.whatif.simulate import Policy, start_whole
from slurm_gpushare.whatif.world import World


class Sjf(Policy):
    """Shortest job first."""

    def schedule(self, world: World) -> None:
        start_whole(world, self.by_duration)


class Preemptive(Policy):
    """Runs the jobs that rank first, at no cost for stopping and going on."""

    @abstractmethod
    def rank(self, world: World, jobs: Ints) -> Floats:
        """Lower goes first; ties go to the lower job index."""

    def schedule(self, world: World) -> None:
        work = world.work
        running = np.unique(world.first[world.first >= 0])
        waiting = np.flatnonzero(world.waiting)
        if len(waiting) == 0:
            return
        jobs = np.union1d(running, waiting)
        queue = jobs[np.argsort(self.rank(world, jobs), kind="stable")]
        if (work.num_gpus[queue[: work.gpus]] == 1).all():
            chosen = queue[: work.gpus]
        else:
            chosen = np.array(_fitting(queue, work.num_gpus, work.gpus), np.int64)
        for job in np.setdiff1d(running, chosen).tolist():
            world.stop(job)
        start_whole(world, chosen)


def _fitting(queue: Ints, need: Ints, gpus: int) -> list[int]:
    chosen = []
    for job in queue.tolist():
        if need[job] <= gpus:
            chosen.append(job)
            gpus -= int(need[job])
            if gpus == 0:
                break
    return chosen


class Srpt(Preemptive):
    """Shortest remaining processing time: a bound to look at, since no site can run it."""

    def rank(self, world: World, jobs: Ints) -> Floats:
        return world.left_s(jobs) * world.work.num_gpus[jobs]


class Tiresias(Preemptive):
    """Least attained service in two queues: under one GPU hour first, by submit time within each."""

    THRESHOLD_S = 3600.0

    def _attained_s(self, world: World, jobs: Ints) -> Floats:
        alone: Floats = (world.work.duration_s[jobs] - world.left_s(jobs)) * world.work.num_gpus[jobs]
        return alone

    def rank(self, world: World, jobs: Ints) -> Floats:
        return (self._attained_s(world, jobs) >= self.THRESHOLD_S - 1e-6).astype(float)

    def wake_s(self, world: World) -> float:
        running = np.unique(world.first[world.first >= 0])
        to_go = (self.THRESHOLD_S - self._attained_s(world, running)) / world.work.num_gpus[running]
        to_go = to_go[to_go > 1e-6]
        return world.now_s + float(to_go.min()) if len(to_go) and world.waiting.any() else np.inf
