"""What sharing would do at a site, from its own history: the same jobs in the simulator, alone and sharing.

Which workloads the jobs are is unknown, so each user's jobs are dealt profiles of the shipped measurements several
times, and what comes of it is told as a band. Durations count as unknown but for time limits, as on a new site.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.knowledge.rates import Ints
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.whatif.our_policy import Gpushare, Options
from slurm_gpushare.whatif.simulate import Fifo, run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs, with_fractions
from slurm_gpushare.whatif.world import metrics

DRAWS = 5
MOST_JOBS = 20_000
WORKLOADS_OF_A_USER = 3


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job of a site's history. `wait_s` is None where a trace does not tell it."""

    partition: str
    submit_s: float
    duration_s: float
    gpus: int
    user: str = ""
    wait_s: float | None = None
    fraction: float = 1.0
    token: str | None = None
    """Of a job that would share, where the site knows it."""
    limit_s: float | None = None
    held: float | None = None
    """The cards that it held, where that is another number than `gpus`: half a card, if it shared one."""


@dataclass(frozen=True, slots=True)
class Band:
    """What several draws gave: the least, the middle and the most."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Band:
        ordered = sorted(values)
        return cls(ordered[0], float(np.median(ordered)), ordered[-1])


@dataclass(frozen=True, slots=True)
class Assessment:
    """One partition. Hours are GPU hours; waits and slow-down are means over its jobs."""

    partition: str
    jobs: int
    all_jobs: int
    """Before the period was cut to what can be simulated."""
    single_gpu_pct: float
    wide_jobs_pct: float
    """Jobs of several GPUs, which share with nobody here; and their part of the GPU hours."""
    wide_hours_pct: float
    load: float
    """GPU hours of the jobs over those that the cards have in this time."""
    gpus: int
    days: float
    gpu_hours: float
    observed_wait_s: float | None
    """As the jobs really waited."""
    plain_wait_s: float
    """As they wait in the simulator without sharing: how far to believe it."""
    saved_gpu_h: Band
    saved_pct: Band
    wait_s: Band
    waits_avoided_h: Band
    isd_mean_pct: Band
    isd_p95_pct: Band
    shared_pct: Band


def cards_of(job: AccountedJob) -> int:
    """Those that it would have by itself: a sharer one, a gang all of its node's."""
    return job.gpus or (job.cards if job.shards else 0)


def past_job(job: AccountedJob) -> PastJob:
    """As accounting has it; its wait begins when it could have started."""
    eligible_s = job.submit_s if job.eligible_s is None else max(job.submit_s, job.eligible_s)
    wait_s = max((job.start_s or 0) - eligible_s, 0)
    # With two shards a card. 22.05 may count too many of a job that was moved while it waited.
    held = None if job.gpus else min(job.cards, job.shards / 2.0)
    return PastJob(job.partition, eligible_s, job.elapsed_s, cards_of(job), job.user, wait_s, held=held)


def shipped_pairs() -> MeasuredPairs:
    """The measured V100 pairs that the shipped knowledge was made of; two that do not fit together are NaN."""
    base = default_kb()
    rate = np.full((len(base.members), len(base.members)), np.nan)
    count = np.zeros_like(rate)
    for victim, neighbour, value in base.measured:
        known = 0.0 if np.isnan(rate[victim, neighbour]) else rate[victim, neighbour] * count[victim, neighbour]
        count[victim, neighbour] += 1
        rate[victim, neighbour] = (known + value) / count[victim, neighbour]
    both = np.isfinite(rate) & np.isfinite(rate.T)
    return MeasuredPairs(tuple(member.name for member in base.members), np.where(both, rate, np.nan))


def most_in_use(jobs: Iterable[PastJob]) -> int:
    """The most GPUs that were in use at once: how many the partition has at least."""
    ends: list[tuple[float, float]] = []
    used = most = 0.0
    for job in sorted(jobs, key=lambda job: job.submit_s + (job.wait_s or 0.0)):
        start_s = job.submit_s + (job.wait_s or 0.0)
        while ends and ends[0][0] <= start_s:
            used -= heapq.heappop(ends)[1]
        held = job.gpus if job.held is None else job.held
        used += held
        heapq.heappush(ends, (start_s + job.duration_s, held))
        most = max(most, used)
    return math.ceil(most)


def deal(jobs: Sequence[PastJob], pairs: MeasuredPairs, gpus: int, seed: int, opt_in_pct: float) -> SimulatedJobs:
    """The jobs with profiles: a user has a few workloads, and some users take no part."""
    random = np.random.default_rng([seed, 17])
    users = {name: i for i, name in enumerate(dict.fromkeys(job.user for job in jobs))}
    of_user = random.integers(len(pairs.profiles), size=(len(users), WORKLOADS_OF_A_USER))
    takes_part = random.uniform(0, 100, len(users)) < opt_in_pct
    user = np.array([users[job.user] for job in jobs])
    profile = of_user[user, random.integers(WORKLOADS_OF_A_USER, size=len(jobs))]
    work = as_simulated(jobs, gpus, profile.astype(np.int64), pairs, seed)
    fraction = np.array([job.fraction for job in jobs], float)
    if (fraction < 1.0).any():
        # What it says it needs of its card is what counts, so a job that asks for all of it stays alone.
        work = with_fractions(work, fraction)
    return work if takes_part.all() else _without(work, ~takes_part[user])


def as_simulated(
    jobs: Sequence[PastJob], gpus: int, profile: Ints, pairs: MeasuredPairs, seed: int = 0
) -> SimulatedJobs:
    """The jobs as the simulator runs them, each with its profile."""
    submit_s = np.array([job.submit_s for job in jobs], float)
    duration_s = np.array([job.duration_s for job in jobs], float)
    num_gpus = np.array([job.gpus for job in jobs], np.int64)
    return SimulatedJobs(gpus, submit_s - submit_s[0], duration_s, num_gpus, profile, pairs, seed)


def _without(work: SimulatedJobs, apart: np.ndarray) -> SimulatedJobs:
    """The same where the jobs `apart` share with nobody."""
    size = len(work.pairs.profiles)
    rate = np.pad(work.pairs.rate, (0, 1), constant_values=np.nan)
    pairs = MeasuredPairs((*work.pairs.profiles, "without a token"), rate)
    return replace(work, profile=np.where(apart, size, work.profile), pairs=pairs)


def assess_partition(
    name: str,
    jobs: Sequence[PastJob],
    gpus: int | None = None,
    draws: int = DRAWS,
    opt_in_pct: float = 100.0,
    most_jobs: int = MOST_JOBS,
    progress: Callable[[int], None] | None = None,
    mechanism: str = "as-measured",
) -> Assessment:
    """Simulate a partition's jobs alone once, and sharing as often as there are draws."""
    ordered = sorted(jobs, key=lambda job: job.submit_s)[-most_jobs:]
    cards = gpus or most_in_use(ordered)
    ordered = [job for job in ordered if job.gpus <= cards]
    pairs = shipped_pairs().under(mechanism)
    first = deal(ordered, pairs, cards, 0, opt_in_pct)
    plain = metrics(run(first, Fifo(first, 0), progress))
    options = Options("learned", "limit", "priority", PolicySettings())
    found = []
    for seed in range(draws):
        work = deal(ordered, pairs, cards, seed, opt_in_pct)
        found.append(metrics(run(work, Gpushare(work, seed, options), progress)))
    hours = float(np.sum(first.duration_s * first.num_gpus)) / 3600.0
    wide = first.num_gpus > 1
    wide_hours = float(np.sum((first.duration_s * first.num_gpus)[wide])) / 3600.0
    last_s = max(job.submit_s for job in ordered) - ordered[0].submit_s
    there_h = cards * max(last_s, float(first.duration_s.max())) / 3600.0
    saved = [plain["busy_gpu_hours"] - figures["busy_gpu_hours"] for figures in found]
    waits = [job.wait_s for job in ordered if job.wait_s is not None]
    return Assessment(
        partition=name,
        jobs=len(ordered),
        all_jobs=len(jobs),
        single_gpu_pct=100.0 * float(np.mean(~wide)),
        wide_jobs_pct=100.0 * float(np.mean(wide)),
        wide_hours_pct=100.0 * wide_hours / hours if hours else 0.0,
        load=hours / there_h if there_h else 0.0,
        gpus=cards,
        days=(ordered[-1].submit_s - ordered[0].submit_s) / 86400.0,
        gpu_hours=hours,
        observed_wait_s=float(np.mean(waits)) if waits else None,
        plain_wait_s=plain["avg_wait_s"],
        saved_gpu_h=Band.of(saved),
        saved_pct=Band.of([100.0 * value / hours for value in saved]),
        wait_s=Band.of([figures["avg_wait_s"] for figures in found]),
        waits_avoided_h=Band.of([(plain["avg_wait_s"] - f["avg_wait_s"]) * len(ordered) / 3600.0 for f in found]),
        isd_mean_pct=Band.of([figures["isd_mean_pct"] for figures in found]),
        isd_p95_pct=Band.of([figures["isd_p95_pct"] for figures in found]),
        shared_pct=Band.of([100.0 * figures["shared_fraction"] for figures in found]),
    )
