"""A second simulator, slow and obvious: lists, loops and the rules as they are written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Job:
    index: int
    submit_s: float
    duration_s: float
    profile: int
    left_s: float = 0.0
    start_s: float | None = None
    end_s: float | None = None


@dataclass
class Cluster:
    rate: list[list[float]]
    gpus: list[list[Job]] = field(default_factory=list)

    def rate_of(self, job: Job, gpu: list[Job]) -> float:
        others = [other for other in gpu if other is not job]
        return self.rate[job.profile][others[0].profile] if others else 1.0

    def can_share(self, a: Job, b: Job) -> bool:
        return not math.isnan(self.rate[a.profile][b.profile])


def place(policy: str, job: Job, cluster: Cluster) -> list[Job] | None:
    """The GPU that `policy` gives this job now, or None."""
    gpus = cluster.gpus
    halves = [gpu for gpu in gpus if len(gpu) == 1 and cluster.can_share(job, gpu[0])]
    if policy == "packed-share":
        return next((gpu for gpu in gpus if not gpu or gpu in halves), None)
    empty = next((gpu for gpu in gpus if not gpu), None)
    if empty is not None or policy in {"fifo", "sjf"}:
        return empty
    if policy in {"fcfs-share", "sjf-ffs"}:
        return halves[0] if halves else None
    if policy == "gavel-packing":
        sums = [(-cluster.rate[job.profile][g[0].profile] - cluster.rate[g[0].profile][job.profile], g) for g in halves]
        good = [(value, gpu) for value, gpu in sums if value < -1.5]
        return min(good, key=lambda pair: pair[0])[1] if good else None
    assert policy == "sjf-bsbf"
    good = []
    for gpu in halves:
        together, one_by_one = mean_completions(job, gpu[0], cluster)
        if together < one_by_one:
            good.append((together, gpu))
    return min(good, key=lambda pair: pair[0])[1] if good else None


def mean_completions(a: Job, b: Job, cluster: Cluster) -> tuple[float, float]:
    """Of guest a and resident b: together from now on, and b before a."""
    rate_a, rate_b = cluster.rate[a.profile][b.profile], cluster.rate[b.profile][a.profile]
    shared_a, shared_b = a.duration_s / rate_a, b.left_s / rate_b
    if shared_a <= shared_b:
        together = (shared_a + shared_a + b.left_s - shared_a * rate_b) / 2
    else:
        together = (shared_b + shared_b + a.duration_s - shared_b * rate_a) / 2
    return together, (b.left_s + b.left_s + a.duration_s) / 2


def simulate(policy: str, gpus: int, jobs: list[Job], rate: list[list[float]]) -> None:
    """Fill in start and end of all jobs."""
    cluster = Cluster(rate, [[] for _ in range(gpus)])
    for job in jobs:
        job.left_s = job.duration_s
    now_s = 0.0
    while any(job.end_s is None for job in jobs):
        running = [(job, gpu) for gpu in cluster.gpus for job in gpu]
        next_s = min(
            [now_s + job.left_s / cluster.rate_of(job, gpu) for job, gpu in running]
            + [job.submit_s for job in jobs if job.submit_s > now_s]
            + [now_s for job in jobs if job.submit_s <= now_s and job.start_s is None and now_s == 0.0 and not running]
        )
        done = [(job, job.left_s - cluster.rate_of(job, gpu) * (next_s - now_s)) for job, gpu in running]
        now_s = next_s
        for job, left_s in done:
            job.left_s = left_s
            if left_s <= 1e-9 * max(1.0, job.duration_s):
                job.end_s = now_s
        for gpu in cluster.gpus:
            gpu[:] = [job for job in gpu if job.end_s is None]
        queue = [job for job in jobs if job.submit_s <= now_s and job.start_s is None]
        if policy.startswith("sjf"):
            queue.sort(key=lambda job: job.duration_s)
        for job in queue:
            gpu = place(policy, job, cluster)
            if gpu is not None:
                gpu.append(job)
                job.start_s = now_s
            elif policy == "gavel-packing":
                break
