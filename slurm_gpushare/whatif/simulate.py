"""What decides in the simulated cluster, and the plain queue, which is what Slurm does without us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from slurm_gpushare.knowledge.rates import Bools, Floats, Ints
from slurm_gpushare.whatif.traces import SimulatedJobs
from slurm_gpushare.whatif.world import NOBODY, SAME_INSTANT_S, World


def start_whole(world: World, order: Ints) -> None:
    """Start waiting jobs on empty GPUs, in `order`; the first that does not fit gets a reservation."""
    empty = world.empty()
    if len(empty) == 0 or not world.waiting.any():
        return
    if world.work.gpus_per_node:
        _start_on_nodes(world, order)
        return
    queue = order[world.waiting[order]]
    need = world.work.num_gpus
    if not (need[queue] > 1).any():
        for job, gpu in zip(queue.tolist(), empty.tolist(), strict=False):
            world.start(job, gpu)
        return
    shadow_s, spare = np.inf, 0
    for job in queue.tolist():
        n = int(need[job])
        if n <= len(empty):
            in_time = world.now_s + world.remaining_s[job] <= shadow_s
            if in_time or n <= spare:
                spare -= 0 if in_time else n
                _start(world, job, empty[:n])
                empty = empty[n:]
                if len(empty) == 0:
                    return
        elif shadow_s == np.inf:
            shadow_s, spare = _reservation(world, n)


def _start(world: World, job: int, gpus: Ints) -> None:
    if len(gpus) == 1:
        world.start(job, int(gpus[0]))
    else:
        world.start_gang(job, gpus)


def _reservation(world: World, n: int) -> tuple[float, int]:
    """When `n` GPUs will be empty, and how many more than that will be."""
    frees_s = np.sort(_frees_s(world))  # empty GPUs come first: they are free now
    shadow_s = float(frees_s[n - 1])
    return shadow_s, int(np.searchsorted(frees_s, shadow_s, side="right")) - n


# Handing out whole GPUs where they are on nodes: a job of several has them on one node, or has nodes entirely.
#
# EASY backfill again, but what is reserved are nodes: jobs behind the first that does not fit may start
# elsewhere, or there if they end in time.


def _start_on_nodes(world: World, order: Ints) -> None:
    """Start waiting jobs in `order`; a single GPU comes from the fullest node with room, so that others stay empty."""
    work, per_node = world.work, world.work.gpus_per_node
    empty = (world.first == NOBODY).reshape(-1, per_node)
    queue = order[world.waiting[order]]
    need, end_s = work.num_gpus[queue], world.now_s + world.remaining_s[queue]
    waiting = np.ones(len(queue), bool)
    reserved, shadow_s = np.zeros(len(empty), bool), np.inf
    while waiting.any() and empty.any():
        free = empty.sum(axis=1)
        in_time = end_s <= shadow_s
        fits = waiting & (_fits(need, np.where(reserved, 0, free), per_node) | (in_time & _fits(need, free, per_node)))
        at = int(np.argmax(fits if np.isfinite(shadow_s) else waiting))
        if not fits[at]:
            if np.isfinite(shadow_s):
                return
            reserved, shadow_s = _reservation_nodes(world, int(need[at]))
            waiting[at] = False
            continue
        gpus = _choose(empty, free if in_time[at] else np.where(reserved, 0, free), int(need[at]))
        _start(world, int(queue[at]), gpus)
        empty.flat[gpus] = False
        waiting[at] = False


def _fits(need: Ints, free: Ints, per_node: int) -> Bools:
    entirely = int((free == per_node).sum())
    return np.where(need <= per_node, need <= free.max(), -(-need // per_node) <= entirely)


def _choose(empty: Bools, free: Ints, need: int) -> Ints:
    """GPUs of the fullest node with room, or of as many empty nodes as it takes."""
    per_node = empty.shape[1]
    if need > per_node:
        nodes = np.flatnonzero(free == per_node)[: -(-need // per_node)]
    else:
        nodes = np.array([int(np.argmin(np.where(free >= need, free, per_node + 1)))])
    gpus: Ints = (nodes[:, None] * per_node + np.arange(per_node))[empty[nodes]]
    return gpus[:need]


def _reservation_nodes(world: World, need: int) -> tuple[Bools, float]:
    """The nodes that can hold such a job first, and when."""
    per_node = world.work.gpus_per_node
    frees_s = np.sort(_frees_s(world).reshape(-1, per_node), axis=1)
    node_s = frees_s[:, min(need, per_node) - 1]
    first = np.argsort(node_s, kind="stable")[: -(-need // per_node)]
    reserved = np.zeros(len(node_s), bool)
    reserved[first] = True
    return reserved, float(node_s[first].max())


def _frees_s(world: World) -> Floats:
    """When each GPU will be empty."""
    ends = [
        world.now_s + np.where(jobs >= 0, world.left_s(jobs) / np.maximum(world.rate[jobs], 1e-9), 0.0)
        for jobs in (world.first, world.second)
    ]
    return np.maximum(*ends)


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
