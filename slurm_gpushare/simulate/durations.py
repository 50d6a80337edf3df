"""What a scheduler believes of durations: the truth, the user's time limits, or what earlier jobs took."""

from __future__ import annotations

import numpy as np

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
        self._sum_log = np.zeros(self._kinds)
        self._count = np.zeros(self._kinds)

    def ended(self, job: int) -> None:
        """Take in how long `job` took."""
        if self.mode == "history":
            kind = self._profile[job]
            self._sum_log[kind] += np.log(self._duration_s[job])
            self._count[kind] += 1

    def arrived(self, jobs: Ints) -> None:
        """Say what is expected of jobs just submitted, from their token's earlier runs where there are any."""
        if self.mode != "history":
            return
        kinds = self._profile[jobs]
        seen = self._count[kinds] > 0
        typical = np.exp(self._sum_log[kinds[seen]] / self._count[kinds[seen]])
        known = jobs[seen]
        self.expected_s[known] = np.minimum(typical, self.limit_s[known])
        self.only_limit[known] = False
