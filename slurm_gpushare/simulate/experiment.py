"""A small experiment simulated job by job: what a real run of the same jobs should have shown.

Every job is a kind of its own here, as every token is for the helper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.simulate.exclusive import Fifo, Policy
from slurm_gpushare.simulate.ours import Gpushare, LearnedRates, Options
from slurm_gpushare.simulate.run import run
from slurm_gpushare.simulate.sharing import FcfsShare, Paper, RandomShare
from slurm_gpushare.simulate.workload import Floats, Pairs, Workload
from slurm_gpushare.simulate.world import World


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the experiment, as it was submitted."""

    token: str
    cluster: int
    submit_s: float
    work_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """The jobs in queue order, and how fast each (row) is beside each other one; NaN where they cannot share."""

    jobs: Sequence[Job]
    rate: Floats
    gpus: int
    knowledge: LearnedKnowledge
    """What the helper knew when it began."""
    settings: PolicySettings
    lease_s: float = np.inf
    """So long after its submission a job waits for the helper's word; then Slurm may start it, on a whole card."""
    start_s: float = 0.0
    """From the moment a card is free until the next job computes: Slurm's own time, spent by every job."""

    def run(self, policy: str, seed: int = 0) -> World:
        """Simulate the jobs under the helper's `policy`, or under ``exclusive``."""
        count = len(self.jobs)
        work = Workload(
            gpus=self.gpus,
            submit_s=np.array([job.submit_s for job in self.jobs], float),
            duration_s=np.array([job.work_s + self.start_s for job in self.jobs], float),
            num_gpus=np.ones(count, np.int64),
            profile=np.arange(count),
            pairs=Pairs(tuple(job.token for job in self.jobs), self.rate),
            seed=seed,
        )
        return run(work, self._policy(policy, work), world=World(work, self.lease_s))

    def _policy(self, name: str, work: Workload) -> Policy:
        if name == "exclusive":
            return Fifo(work)
        if name == "fcfs":
            return FcfsShare(work)
        if name == "random":
            return RandomShare(work, work.seed)
        if name == "paper":
            paper = Paper(work)
            cluster = np.array([job.cluster for job in self.jobs])
            paper.complement = cluster[:, None] + cluster[None, :] == 2
            return paper
        if name == "gpushare":
            ours = Gpushare(work, work.seed, Options(settings=self.settings))
            ours.seen = LearnedRates(work, self.settings, True, self.knowledge)
            ours.durations.limit_s = np.array([job.limit_s for job in self.jobs], float)
            return ours
        raise BadInput(f"no policy '{name}' to simulate")


def mean_jct_s(world: World) -> float:
    """Mean time from submission to end."""
    return float(np.mean(world.end_s - world.work.submit_s))
