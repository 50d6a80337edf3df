"""What a scheduler believes of durations: the truth, the user's time limits, or what earlier jobs took."""

from __future__ import annotations

import numpy as np

from slurm_gpushare.coschedule.expect import from_history_s
from slurm_gpushare.simulate.workload import Bools, Floats, Ints, Workload

MODES = ("known", "limit", "history")
LONGEST_FACTOR = 5.0


class Durations:
    """Expected durations and limits of all jobs of a workload, by job index."""

    def __init__(self, work: Workload, mode: str, limit_use: float) -> None:
        self.mode = mode
        self._profile = work.profile
        self._kinds = len(work.pairs.profiles)
        self._duration_s = work.duration_s
        factor = np.random.default_rng([work.seed, 1]).uniform(1.0, LONGEST_FACTOR, work.jobs)
        self.limit_s: Floats = work.duration_s * factor
        self.expected_s: Floats = work.duration_s.copy() if mode == "known" else limit_use * self.limit_s
        self.only_limit: Bools = np.full(work.jobs, mode != "known")
        self._limit_use = limit_use
        self._count, self._sum, self._sum_squares = (np.zeros(self._kinds) for _ in range(3))  # of log durations

    def ended(self, job: int) -> None:
        """Take in how long `job` took."""
        if self.mode == "history":
            kind, log_s = self._profile[job], float(np.log(self._duration_s[job]))
            self._count[kind] += 1
            self._sum[kind] += log_s
            self._sum_squares[kind] += log_s * log_s

    def arrived(self, jobs: Ints) -> None:
        """Say what is expected of jobs just submitted, from their token's earlier runs where there are some."""
        if self.mode != "history":
            return
        jobs = jobs[self._count[self._profile[jobs]] > 1]
        kinds = self._profile[jobs]
        mean = self._sum[kinds] / self._count[kinds]
        scatter = np.sqrt(np.maximum(self._sum_squares[kinds] / self._count[kinds] - mean**2, 0.0))
        self.expected_s[jobs] = from_history_s(np.exp(mean), scatter, self.limit_s[jobs], self._limit_use)
        self.only_limit[jobs] = False
