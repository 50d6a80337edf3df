"""The simulator's word on a replay: the same jobs, limits, rates and knowledge, and the time that Slurm takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gpushare_lab.emulator.node import MEM_TOTAL_MIB
from gpushare_lab.experiment.replay_jobs import ReplayJobs
from gpushare_lab.experiment.replay_run import MEASURED
from gpushare_lab.peers.sharing import FcfsShare, PackedShare, Paper, RandomShare
from slurm_gpushare.knowledge.interference import Telemetry
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.our_policy import Gpushare, Options
from slurm_gpushare.whatif.simulate import Fifo, Policy, run
from slurm_gpushare.whatif.traces import SimulatedJobs
from slurm_gpushare.whatif.world import metrics


def simulated(policy: str, jobs: ReplayJobs, knowledge: str, start_s: float) -> dict[str, float]:
    """The figures of `policy` for these jobs, where every job holds its card for `start_s` before it computes."""
    work = replace(jobs.work, duration_s=jobs.work.duration_s + start_s)
    return metrics(run(work, _policy(policy, work, jobs, knowledge)))


def _policy(name: str, work: SimulatedJobs, jobs: ReplayJobs, knowledge: str) -> Policy:
    peers: dict[str, Callable[[SimulatedJobs, int], Policy]] = {
        "exclusive": Fifo,
        "packed": PackedShare,
        "fcfs": FcfsShare,
        "random": RandomShare,
        "paper": Paper,
    }
    if name in peers:
        return peers[name](work, work.seed)
    if name == "gpushare":
        return _gpushare(work, jobs, knowledge)
    raise BadInput(f"no policy '{name}' to simulate")


def _gpushare(work: SimulatedJobs, jobs: ReplayJobs, knowledge: str) -> Gpushare:
    """The helper's plan with what the helper has: telemetry, limits, and earlier runs where jobs are measured."""
    settings = PolicySettings()
    shares = [(d.gpu_util_pct / 100, d.mem_access_pct / 100, d.mem_mib / MEM_TOTAL_MIB) for d in jobs.demands]
    telemetry = Telemetry(*np.array(shares, dtype=np.float64).T)
    durations = "history" if knowledge in MEASURED else "limit"
    options = Options(knowledge, durations, "priority", settings, telemetry=telemetry, share_gangs=True)
    ours = Gpushare(work, work.seed, options)
    ours.durations.limited(jobs.limit_s)
    return ours
