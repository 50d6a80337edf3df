"""What the simulator says of the paper's experiment: the same jobs, rates, limits and knowledge as on the testbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.knowledge.default import default_kb
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.knowledge.prior import CellPrior
from slurm_gpushare.simulate.experiment import Experiment, Job, mean_jct_s
from slurm_gpushare.testbed.pairs import read_pairs
from slurm_gpushare.testbed.paper import CARD_MIB, EXCLUSIVE, Result, Training, history
from slurm_gpushare.testbed.workload import rate_function

LEASE_S = 10.0  # as the testbed's gpushare.conf has it
LOOK_S = 0.5
"""Half of the testbed's TickSeconds: how long a free half waits, on average, for the helper to look."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy should give."""

    makespan_s: float
    mean_jct_s: float
    shared: int


def forecasts(jobs: Sequence[Training], gpus: int, results: Sequence[Result], seed: int = 0) -> dict[str, Forecast]:
    """A forecast for each policy that was run.

    What Slurm needs to start a job is no part of any policy; it is taken from the exclusive run, where there is one.
    The helper adds the time until its next look.
    """
    start_s = next((result.start_s for result in results if result.policy == EXCLUSIVE), 0.0)
    found = {}
    for result in results:
        look_s = 0.0 if result.policy == EXCLUSIVE else LOOK_S
        world = experiment(jobs, gpus, start_s + look_s).run(result.policy, seed)
        found[result.policy] = Forecast(float(world.end_s.max()), mean_jct_s(world), int(world.shared.sum()))
    return found


def furthest_off_pct(results: Sequence[Result], simulated: Mapping[str, Forecast]) -> tuple[float, float]:
    """How far off the forecasts are at most: makespan and mean JCT."""
    pairs = [(result, simulated[result.policy]) for result in results]
    makespan = max(abs(forecast.makespan_s / result.makespan_s - 1.0) for result, forecast in pairs)
    jct = max(abs(forecast.mean_jct_s / result.mean_jct_s - 1.0) for result, forecast in pairs)
    return 100.0 * makespan, 100.0 * jct


def experiment(jobs: Sequence[Training], gpus: int, start_s: float, lease_s: float = LEASE_S) -> Experiment:
    """The jobs as the helper sees them, all submitted at once."""
    settings = PolicySettings()
    prior = CellPrior(default_kb())
    prior.cluster_of.update({job.token: job.cluster for job in jobs})
    knowledge = LearnedKnowledge(prior)
    for seen in history(jobs):
        knowledge.observe(seen.victim, seen.neighbour, seen.rate, seen.weight)
    table = read_pairs(jobs[0].pairs, "V100") if jobs[0].pairs is not None else None
    room_mib = (1.0 - settings.memory_headroom_pct / 100.0) * CARD_MIB
    rate = np.full((len(jobs), len(jobs)), np.nan)
    for i, job in enumerate(jobs):
        rate_of = rate_function(job.demand, table)
        for j, other in enumerate(jobs):
            if job.demand.mem_mib + other.demand.mem_mib <= room_mib:
                rate[i, j] = rate_of([other.demand])
    queue = [Job(job.token, job.cluster, 0.0, job.work_s, 60.0 * job.limit_min) for job in jobs]
    return Experiment(queue, rate, gpus, knowledge, settings, lease_s, start_s)
