"""Handing out whole GPUs in a given order, with EASY backfill where jobs of several GPUs wait."""

from __future__ import annotations

import numpy as np

from slurm_gpushare.simulate.nodes import start_on_nodes
from slurm_gpushare.simulate.workload import Ints
from slurm_gpushare.simulate.world import World


def start_whole(world: World, order: Ints) -> None:
    """Start waiting jobs on empty GPUs, in `order`; the first that does not fit gets a reservation."""
    empty = world.empty()
    if len(empty) == 0 or not world.waiting.any():
        return
    if world.work.gpus_per_node:
        start_on_nodes(world, order)
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
    first, second = world.first, world.second
    end_s = world.now_s + np.where(first >= 0, world.left_s(first) / np.maximum(world.rate[first], 1e-9), 0.0)
    guest_s = world.now_s + np.where(second >= 0, world.left_s(second) / np.maximum(world.rate[second], 1e-9), 0.0)
    frees_s = np.sort(np.maximum(end_s, guest_s))  # empty GPUs come first: they are free now
    shadow_s = float(frees_s[n - 1])
    return shadow_s, int(np.searchsorted(frees_s, shadow_s, side="right")) - n
