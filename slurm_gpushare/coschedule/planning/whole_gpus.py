"""Whole GPUs, in priority order: everybody's, since other people's jobs get theirs first where they rank higher."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slurm_gpushare.coschedule.planning.constraints import Bools, Ints, Sites
from slurm_gpushare.coschedule.view.snapshot import PendingJob


def hand_out(sites: Sites, empty: Ints, queue: Iterable[tuple[int, PendingJob]]) -> dict[int, int]:
    """Which job (by place in the queue) gets which empty GPU, or gets that one first of several.

    Jobs without a token are among them, since Slurm will start them there or elsewhere before ours that rank lower.
    Room only shrinks on the way, so what was too small for a demand once is not looked at for it again.
    """
    free = np.zeros(len(sites.gpus), bool)
    free[empty] = True
    looked: dict[object, int] = {}
    granted: dict[int, int] = {}
    left = len(empty)
    for rank, job in queue:
        if left == 0:
            break
        shape = (sites.demand(job), job.cpus, job.node_mem_mib, job.limit_s, job.gpus, job.gang)
        start = looked.get(shape, 0)
        if start == len(empty):
            continue
        allowed = sites.allowed(job)
        found: list[int] = []
        at = start
        if job.gang:
            found = _all_of_a_node(sites, free & allowed, job)
        while not job.gang and at < len(empty) and len(found) < job.gpus:
            gpu = int(empty[at])
            at += 1
            if free[gpu] and allowed[gpu] and (job.gpus > 1 or sites.has_room(gpu, job)):
                found.append(gpu)
        looked[shape] = at if len(found) == job.gpus else len(empty)
        if len(found) < job.gpus:
            continue
        free[found] = False
        left -= len(found)
        sites.take(found[0], job)
        granted[rank] = found[0]
    return granted


def _all_of_a_node(sites: Sites, free: Bools, job: PendingJob) -> list[int]:
    """The cards of the first node that is entirely free for a gang; empty if there is none."""
    taken = np.bincount(sites.node, weights=~free, minlength=len(sites.nodes))
    for node in np.flatnonzero(taken == 0).tolist():
        cards = np.flatnonzero(sites.node == node)
        if len(cards) == job.gpus and sites.has_room(int(cards[0]), job):
            return [int(card) for card in cards]
    return []
