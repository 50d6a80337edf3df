"""The simulated cluster: who is on which GPU, how far each job has got, and what ends next.

Policies decide and call what starts, joins and stops jobs; the world keeps the books.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.knowledge.rates import Bools, Floats, Ints
from slurm_gpushare.whatif.traces import SimulatedJobs

NOBODY = -1
SAME_INSTANT_S = 1e-9


class World:
    """State of one run. Arrays are indexed by job or by GPU; NOBODY marks a free half.

    A job that has waited for longer than `lease_s` takes an empty card whole, as on a real Slurm: the job is visible
    there with its own request, and Slurm starts it before the helper looks.
    """

    def __init__(self, work: SimulatedJobs, lease_s: float = np.inf) -> None:
        jobs, gpus = work.jobs, work.gpus
        self.work = work
        self.lease_s = lease_s
        self.rate_of = work.pairs.rate
        self.can_share = np.isfinite(self.rate_of)
        self.now_s = 0.0
        # jobs
        self.waiting = np.zeros(jobs, bool)
        self.remaining_s = work.duration_s.copy()  # alone-time still to do, as of since_s
        self.rate = np.zeros(jobs)
        self.since_s = np.zeros(jobs)
        self.gpu = np.full(jobs, NOBODY)
        self.start_s = np.full(jobs, np.nan)
        self.end_s = np.full(jobs, np.nan)
        self.ran_s = np.zeros(jobs)
        self.guest = np.zeros(jobs, bool)
        self.shared = np.zeros(jobs, bool)
        self.stopped = np.zeros(jobs, bool)  # at its node, beside its resident
        self._stood_s = np.zeros(jobs)
        # GPUs
        self.first = np.full(gpus, NOBODY)
        self.second = np.full(gpus, NOBODY)
        self.whole = np.zeros(gpus, bool)  # nobody may join
        self.gang: dict[int, list[int]] = {}  # GPUs of a multi-GPU job; all of them whole, or shared with one other
        self.busy_s = 0.0
        self._busy_since = np.zeros(gpus)
        self.pairings_begun: list[tuple[int, int, float]] = []  # (job, job, when): what can be learned from
        self.pairings_ended: list[tuple[int, int, float]] = []  # (job, job, seconds)
        self._paired_since = np.zeros(gpus)
        self._ends: list[tuple[float, int, int]] = []
        self._version = np.zeros(jobs, np.int64)

    # -- what policies look at ---------------------------------------------------------------
    def empty(self) -> NDArray[np.int64]:
        """Empty GPUs, lowest index first."""
        return np.flatnonzero(self.first == NOBODY)

    def halves(self) -> NDArray[np.int64]:
        """GPUs where one sharer has room beside it."""
        return np.flatnonzero((self.first != NOBODY) & (self.second == NOBODY) & ~self.whole)

    def left_s(self, jobs: NDArray[np.int64]) -> NDArray[np.float64]:
        """Alone-time that these jobs still have to do, now."""
        return self.remaining_s[jobs] - self.rate[jobs] * (self.now_s - self.since_s[jobs])

    def stood_s(self, jobs: NDArray[np.int64]) -> NDArray[np.float64]:
        """For how long these running jobs have stood still, until now."""
        return self._stood_s[jobs] + self.stopped[jobs] * (self.now_s - self.since_s[jobs])

    # -- what policies do ---------------------------------------------------------------------
    def start(self, job: int, gpu: int) -> None:
        """Put a waiting single-GPU job on `gpu`, alone or beside the job there."""
        assert self.waiting[job], job
        assert self.second[gpu] == NOBODY, gpu
        assert not self.whole[gpu], gpu
        self._begin(job, gpu)
        if self.first[gpu] == NOBODY:
            self.first[gpu] = job
            self.whole[gpu] = self.now_s - self.work.submit_s[job] > self.lease_s
            self._busy_since[gpu] = self.now_s
        else:
            self.second[gpu] = job
            self._pair(job, int(self.first[gpu]), gpu)
            return
        self._set_rates(gpu)

    def join(self, job: int, resident: int) -> None:
        """Put a waiting single-GPU job beside another one."""
        self.start(job, int(self.gpu[resident]))

    def start_gang(self, job: int, gpus: NDArray[np.int64]) -> None:
        """Put a multi-GPU job on empty GPUs, all of them whole."""
        assert self.waiting[job], job
        assert (self.first[gpus] == NOBODY).all(), gpus
        self._begin(job, int(gpus[0]))
        self.first[gpus] = job
        self.whole[gpus] = True
        self._busy_since[gpus] = self.now_s
        self.gang[job] = [int(gpu) for gpu in gpus]
        self._run_at(job, 1.0)

    def lone_gangs(self) -> NDArray[np.int64]:
        """Jobs that have one node entirely and to themselves."""
        wide = [job for job, gpus in self.gang.items() if len(gpus) == self.work.gpus_per_node]
        return np.array([job for job in sorted(wide) if self.second[self.gang[job][0]] == NOBODY], np.int64)

    def gang_pairs(self) -> list[tuple[int, int]]:
        """Who shares all GPUs of a node with whom."""
        leads = sorted({gpus[0] for gpus in self.gang.values() if self.second[gpus[0]] != NOBODY})
        return [(int(self.first[gpu]), int(self.second[gpu])) for gpu in leads]

    def join_gang(self, job: int, resident: int) -> None:
        """Put a waiting job that wants a whole node beside the one that has it, on all of its GPUs."""
        assert self.waiting[job], job
        gpus = self.gang[resident]
        assert len(gpus) == self.work.num_gpus[job], job
        assert (self.second[gpus] == NOBODY).all(), gpus
        self._begin(job, gpus[0])
        self.second[gpus] = job
        self.gang[job] = gpus
        self._pair(job, resident, gpus[0])

    def stop(self, job: int) -> None:
        """Take a running job off its GPU and back into the queue, its progress kept."""
        self._leave(job)
        self.waiting[job] = True

    def stop_at_node(self, job: int, still: bool) -> None:
        """Let the one that came last stand still, or go on; it keeps its half of the card."""
        self._run_at(job, 0.0)
        self.stopped[job] = still
        self._set_rates(int(self.gpu[job]))

    # -- what the clock does ------------------------------------------------------------------
    def next_end_s(self) -> float:
        """When the next job ends, if nothing else happens."""
        while self._ends and self._ends[0][2] != self._version[self._ends[0][1]]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else float("inf")

    def finish_due(self) -> list[int]:
        """End the jobs whose time has come."""
        done = []
        while self.next_end_s() <= self.now_s + SAME_INSTANT_S:
            job = self._ends[0][1]
            self._leave(job)
            self.remaining_s[job] = 0.0
            self.end_s[job] = self.now_s
            done.append(job)
        return done

    # -- books --------------------------------------------------------------------------------
    def _begin(self, job: int, gpu: int) -> None:
        self.waiting[job] = False
        self.gpu[job] = gpu
        self.since_s[job] = self.now_s
        if np.isnan(self.start_s[job]):
            self.start_s[job] = self.now_s

    def _pair(self, job: int, resident: int, gpu: int) -> None:
        assert self.can_share[self.work.profile[job], self.work.profile[resident]]
        self.guest[job] |= self.ran_s[job] == 0.0
        self.shared[job] = self.shared[resident] = True
        self._paired_since[gpu] = self.now_s
        self.pairings_begun.append((resident, job, self.now_s))
        self._set_rates(gpu)

    def _leave(self, job: int) -> None:
        self._run_at(job, 0.0)
        self.stopped[job] = False
        self._version[job] += 1
        gpus = self.gang.pop(job, None) or [int(self.gpu[job])]
        gpu = gpus[0]
        self.gpu[job] = NOBODY
        if self.second[gpu] != NOBODY:
            pair = int(self.first[gpu]), int(self.second[gpu])
            self.pairings_ended.append((*pair, self.now_s - float(self._paired_since[gpu])))
        if self.first[gpu] == job:
            self.first[gpus] = self.second[gpus]  # the one who stays is the resident now
            if self.first[gpu] != NOBODY:
                self._run_at(int(self.first[gpu]), 0.0)
                self.stopped[self.first[gpu]] = False
        self.second[gpus] = NOBODY
        if self.first[gpu] == NOBODY:
            self.whole[gpus] = False
            self.busy_s += float(np.sum(self.now_s - self._busy_since[gpus]))
        else:
            self._set_rates(gpu)

    def _set_rates(self, gpu: int) -> None:
        a, b = int(self.first[gpu]), int(self.second[gpu])
        if b == NOBODY:
            self._run_at(a, 1.0)
            return
        if self.stopped[b]:
            self._run_at(a, 1.0)
            self._run_at(b, 0.0)
            return
        kind_a, kind_b = self.work.profile[a], self.work.profile[b]
        self._run_at(a, float(self.rate_of[kind_a, kind_b]))
        self._run_at(b, float(self.rate_of[kind_b, kind_a]))

    def _run_at(self, job: int, rate: float) -> None:
        """Book what `job` did until now, and let it go on at `rate`."""
        passed_s = self.now_s - self.since_s[job]
        self.ran_s[job] += passed_s
        self._stood_s[job] += passed_s if self.stopped[job] else 0.0
        self.remaining_s[job] -= self.rate[job] * passed_s
        self.since_s[job] = self.now_s
        self.rate[job] = rate
        if rate > 0.0:
            self._version[job] += 1
            end_s = self.now_s + max(float(self.remaining_s[job]), 0.0) / rate
            heapq.heappush(self._ends, (end_s, job, int(self._version[job])))


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Every job of a run, by index, and the time in which cards had a job."""

    submit_s: Floats
    end_s: Floats
    ran_s: Floats
    duration_s: Floats
    """Alone on a card."""
    num_gpus: Ints
    shared: Bools
    guest: Bools
    """Started on a card that had a job."""
    busy_s: float
    gpus: int = 0
    """How many cards there were; 0: not known, and so is the energy."""


IDLE_W, WORK_W = 42.0, 116.0
"""Of a V100: idle, and what a job that keeps half of it busy adds."""


def metrics(world: World) -> dict[str, float]:
    """The figures of a finished simulation."""
    work = world.work
    return figures(
        FinishedRun(
            work.submit_s, world.end_s, world.ran_s, work.duration_s, work.num_gpus, world.shared, world.guest,
            world.busy_s, work.gpus,
        )
    )  # fmt: skip


def figures(run: FinishedRun) -> dict[str, float]:
    """The figures of a finished run. ISD is over all jobs; residents are those that had a guest."""
    jct_s = run.end_s - run.submit_s
    wait_s = jct_s - run.ran_s  # for a preempted job, all the time it did not run
    isd_pct = np.maximum((run.ran_s / run.duration_s - 1) * 100, 0.0)
    solo_s = float(np.sum(run.duration_s * run.num_gpus))
    return {
        "avg_jct_s": float(jct_s.mean()),
        "p50_jct_s": percentile(jct_s, 50),
        "p99_jct_s": percentile(jct_s, 99),
        "avg_wait_s": float(wait_s.mean()),
        "max_wait_s": float(wait_s.max()),
        "single_p99_wait_s": percentile(wait_s[run.num_gpus == 1], 99),
        "makespan_s": float(run.end_s.max()),
        "ps_pct": (1 - run.busy_s / solo_s) * 100,
        "isd_mean_pct": float(isd_pct.mean()),
        "isd_p95_pct": percentile(isd_pct, 95),
        "isd_max_pct": float(isd_pct.max()),
        "resident_isd_p99_pct": percentile(isd_pct[run.shared & ~run.guest], 99),
        "guest_isd_p99_pct": percentile(isd_pct[run.guest], 99),
        "shared_fraction": float(run.shared.mean()),
        "busy_gpu_hours": run.busy_s / 3600,
        # The work is the same under every policy: what differs is how long the cards stand there.
        "energy_kwh": (IDLE_W * run.gpus * float(run.end_s.max() - run.submit_s.min()) + WORK_W * solo_s) / 3.6e6,
    }


def percentile(values: Floats, percent: float) -> float:
    """By nearest rank, as in reports: a value that occurred."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else 0.0
