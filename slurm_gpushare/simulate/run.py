"""Run one policy on one workload."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from slurm_gpushare.simulate.exclusive import Policy
from slurm_gpushare.simulate.workload import SimulatedJobs
from slurm_gpushare.simulate.world import SAME_INSTANT_S, World


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
