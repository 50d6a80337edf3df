"""The jobs of a replay: a trace's jobs, their time compressed, each with the profile of one of the measured jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpushare_lab.emulator.card import Demand
from gpushare_lab.emulator.node import MEM_TOTAL_MIB
from gpushare_lab.experiment.made_up_tokens import made_up_token
from gpushare_lab.job.demands import infer_demand
from gpushare_lab.job.pair_rates import EmulatedRates
from gpushare_lab.peers.trace_jobs import Trace, make_workload
from slurm_gpushare.knowledge.cells import tercile_clusters
from slurm_gpushare.knowledge.rates import Bools, Floats
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.known_durations import LONGEST_FACTOR
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs

SHORTEST_S, LONGEST_S = 3.0, 300.0
"""Below it Slurm's own start takes as long as the job; above it a replay does not end."""
ROOM_MIB = (1.0 - PolicySettings().memory_headroom_pct / 100.0) * MEM_TOTAL_MIB
"""What the helper lets two jobs use of a card together."""


@dataclass(frozen=True, slots=True)
class ReplayJobs:
    """What is replayed and simulated, job by job."""

    work: SimulatedJobs
    """As the simulator takes them; its pairs are those that fit on one card."""
    tokens: tuple[str, ...]
    """By profile: a profile is a token."""
    gang_tokens: tuple[str, ...]
    """By profile: a workload that has all GPUs of a node is another one, measured there."""
    clusters: tuple[int, ...]
    """By profile: thirds by how much a profile slows its neighbours."""
    demands: tuple[Demand, ...]
    """By profile."""
    limit_min: tuple[int, ...]
    """By job: Slurm counts time limits in minutes."""
    clipped_short: int
    clipped_long: int
    narrowed: int
    """Jobs that want more GPUs in the trace than a node has here, and got a node."""

    def contradictions(self) -> list[tuple[int, int]]:
        """Profiles that do not fit on one card although their memory says so: measured pairs may contradict."""
        cannot = ~np.isfinite(self.work.pairs.rate) & _fit(self.demands)
        return [(int(a), int(b)) for a, b in zip(*np.nonzero(cannot), strict=True)]

    @property
    def gangs(self) -> Bools:
        """By job: whether it wants all GPUs of a node."""
        wide: Bools = (self.work.num_gpus > 1) & (self.work.num_gpus == self.work.gpus_per_node)
        return wide

    @property
    def tokens_by_width(self) -> dict[int, tuple[str, ...]]:
        """The tokens of jobs for one GPU and, if there are any, of gangs."""
        return {1: self.tokens} | ({self.work.gpus_per_node: self.gang_tokens} if self.gangs.any() else {})

    def token(self, job: int) -> str:
        """What the job opts in with."""
        return (self.gang_tokens if self.gangs[job] else self.tokens)[int(self.work.profile[job])]

    @property
    def limit_s(self) -> Floats:
        return 60.0 * np.array(self.limit_min, float)


def replay_jobs(
    trace: Trace,
    pairs: MeasuredPairs,
    *,
    gpus: int,
    jobs: int | None,
    load: float,
    seed: int,
    mean_s: float,
    node_gpus: int = 0,
) -> ReplayJobs:
    """The first `jobs` single-GPU jobs of `trace`, `mean_s` long on average, arriving at `load` (0: as traced).

    With `node_gpus` those of several GPUs too; none gets more than so many, all of one node.
    """
    multi_gpu = node_gpus > 1
    if multi_gpu:
        wanted, trace = trace.num_gpus, replace(trace, num_gpus=np.minimum(trace.num_gpus, node_gpus))
    traced = make_workload(trace, pairs, gpus=gpus, jobs=jobs, load=0.0, seed=seed, multi_gpu=multi_gpu)
    factor = compression(traced.duration_s, mean_s)
    scaled_s = traced.duration_s * factor
    duration_s = np.clip(scaled_s, SHORTEST_S, LONGEST_S)
    compressed = Trace(traced.submit_s * factor, duration_s, traced.num_gpus)
    work = make_workload(
        compressed, pairs, gpus=gpus, jobs=None, load=load, seed=seed, multi_gpu=multi_gpu, gpus_per_node=node_gpus
    )
    demands = _demands(pairs)
    fits = np.isfinite(pairs.rate) & _fit(demands)
    return ReplayJobs(
        work=replace(work, pairs=MeasuredPairs(pairs.profiles, np.where(fits, pairs.rate, np.nan))),
        tokens=tuple(made_up_token(f"replay {name}") for name in pairs.profiles),
        gang_tokens=tuple(made_up_token(f"replay gang {name}") for name in pairs.profiles),
        clusters=tuple(tercile_clusters(_slows(pairs.rate)).tolist()),
        demands=demands,
        limit_min=_limits_min(work),
        clipped_short=int((scaled_s < SHORTEST_S).sum()),
        clipped_long=int((scaled_s > LONGEST_S).sum()),
        narrowed=int((wanted[: work.jobs] > node_gpus).sum()) if multi_gpu else 0,
    )


def compression(duration_s: Floats, mean_s: float) -> float:
    """By how much to multiply durations, so that their mean is `mean_s` once they are clipped."""
    if not SHORTEST_S <= mean_s <= LONGEST_S:
        raise BadInput(f"--mean-seconds {mean_s:g}: must be from {SHORTEST_S:g} to {LONGEST_S:g}")
    low, high = SHORTEST_S / float(duration_s.max()), LONGEST_S / float(duration_s.min())
    for _ in range(100):
        middle = math.sqrt(low * high)
        if float(np.clip(duration_s * middle, SHORTEST_S, LONGEST_S).mean()) < mean_s:
            low = middle
        else:
            high = middle
    return high


def _limits_min(work: SimulatedJobs) -> tuple[int, ...]:
    """What users ask for: up to five times what the job takes, in whole minutes, as the simulator draws it."""
    factor = np.random.default_rng([work.seed, 1]).uniform(1.0, LONGEST_FACTOR, work.jobs)
    return tuple(np.ceil(work.duration_s * factor / 60.0).astype(int).tolist())


def _demands(pairs: MeasuredPairs) -> tuple[Demand, ...]:
    """A load for each profile that goes with how it fared; pairs that cannot share get too much memory for one card."""
    names, known = pairs.profiles, np.isfinite(pairs.rate)
    cells = [(i, j) for i in range(len(names)) for j in range(len(names))]
    table = EmulatedRates(
        {(names[i], names[j]): min(1.0, float(pairs.rate[i, j])) for i, j in cells if known[i, j]},
        frozenset((names[i], names[j]) for i, j in cells if not known[i, j]),
    )
    return tuple(infer_demand(table, name, int(ROOM_MIB)) for name in names)


def _fit(demands: tuple[Demand, ...]) -> Bools:
    memory = np.array([demand.mem_mib for demand in demands])
    fit: Bools = memory[:, None] + memory[None, :] <= ROOM_MIB
    return fit


def _slows(rate: Floats) -> Floats:
    """How much each profile slows its neighbours on average."""
    measured = np.isfinite(rate)
    lost = np.where(measured, 1.0 - rate, 0.0).sum(axis=0)
    slows: Floats = lost / np.maximum(measured.sum(axis=0), 1)
    return slows


def rate_files(jobs: ReplayJobs, directory: Path) -> Mapping[str, Path]:
    """A file for each profile with its rate beside every other one, 0 where the two do not fit, as light_job reads."""
    names = jobs.work.pairs.profiles
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for index, name in enumerate(names):
        rates = np.nan_to_num(jobs.work.pairs.rate[index], nan=0.0).tolist()
        files[name] = directory / str(index)
        files[name].write_text("".join(f"{seat_name(i)} {rate:.6f}\n" for i, rate in enumerate(rates)))
    return files


def seat_name(profile: int) -> str:
    """What a job writes on its seat: no blanks, whatever the profile is called."""
    return f"p{profile}"
