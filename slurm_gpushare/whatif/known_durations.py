"""What a scheduler believes of durations: the truth, the user's time limits, what earlier jobs took, or nothing.

With nothing (`none`) there are no limits and no tokens' histories: a job is taken for any of those that have ended
here, and what it has done already says the rest. That is Tiresias' idea: what has run for long will run for long.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from slurm_gpushare.helper.durations import UNKNOWN_SITE, Ahead, Range, expect_all, given_done, usual_scatter
from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.store.refine import LEAST_PART, REMEMBERED_RUNS
from slurm_gpushare.whatif.traces import SimulatedJobs

DURATION_MODES = ("known", "limit", "history", "none")
FIRST_GUESS_S = 3600.0
"""The middle of the durations before any job has ended, and with it a spread that says next to nothing."""
FIRST_SPREAD = 2.0
LEAST_ENDED = 10
"""So many jobs must have ended before they say what others are like; then again when they are 5 % more."""
LONGEST_FACTOR = 5.0


class Durations:
    """Expected durations and limits of all jobs of a workload, by job index."""

    def __init__(self, work: SimulatedJobs, mode: str) -> None:
        self.mode = mode
        self._profile = work.profile
        self._runs: list[list[float]] = [[] for _ in work.pairs.profiles]
        self._count, self._scatter = np.zeros(len(self._runs), np.int64), np.zeros(len(self._runs))  # by token
        self._usual = UNKNOWN_SITE
        self._duration_s = work.duration_s
        factor = np.random.default_rng([work.seed, 1]).uniform(1.0, LONGEST_FACTOR, work.jobs)
        self.limit_s: Floats = np.ceil(work.duration_s * factor / 60.0) * 60.0  # as Slurm counts them
        self._middle_s, self._spread = work.duration_s.copy(), np.zeros(work.jobs)
        self._ended_log_s: list[float] = []  # of all jobs, where nothing else is known
        self._look_again_at = LEAST_ENDED
        if mode == "none":
            self.limit_s = np.full(work.jobs, np.inf)
            self._middle_s, self._spread = np.full(work.jobs, FIRST_GUESS_S), np.full(work.jobs, FIRST_SPREAD)
        elif mode != "known":
            self.limited(self.limit_s)
        self.before: Range = self._before(np.arange(work.jobs))

    def limited(self, limit_s: Floats) -> None:
        """Of all jobs these limits are known, and nothing else."""
        none, zero = np.full(len(limit_s), np.nan), np.zeros(len(limit_s))
        self.limit_s = limit_s
        self._middle_s, self._spread = expect_all(none, zero, zero.astype(np.int64), limit_s)
        self.before = self._before(np.arange(len(limit_s)))

    @property
    def expected_s(self) -> Floats:
        """The middle, before a job has started."""
        return self.before.middle_s

    def ahead(self, jobs: Ints, done_s: Floats) -> Ahead:
        """What these running jobs have before them."""
        return Ahead.of(self._middle_s[jobs], self._spread[jobs], self.limit_s[jobs], done_s)

    def ended(self, job: int, shared: bool) -> None:
        """Take in how long `job` took. What the store knows of a token changes for its waiting and running jobs too.

        As in the store, neither a run beside somebody counts nor one that was over at once.
        """
        if self.mode == "none":
            self._ended_anywhere(float(self._duration_s[job]))
        run_s, runs = float(self._duration_s[job]), self._runs[self._profile[job]]
        if self.mode != "history" or shared or (runs and run_s < LEAST_PART * median(runs)):
            return
        runs.append(run_s)
        del runs[:-REMEMBERED_RUNS]
        own = int(self._profile[job])
        self._count[own], self._scatter[own] = len(runs), float(np.log(runs).std())
        before, self._usual = self._usual, usual_scatter(self._scatter, self._count)
        for token in [own] if self._usual == before else np.flatnonzero(self._count).tolist():
            alike = np.flatnonzero(self._profile == token)
            self._expect(alike, median(self._runs[token]), float(self._scatter[token]), int(self._count[token]))

    def _ended_anywhere(self, run_s: float) -> None:
        logs = self._ended_log_s
        logs.append(float(np.log(run_s)))
        if len(logs) >= self._look_again_at:
            self._look_again_at = int(1.05 * len(logs)) + 1
            everybody = np.arange(len(self._duration_s))
            self._expect(everybody, float(np.exp(np.mean(logs))), float(np.std(logs)), len(logs))

    def _expect(self, alike: Ints, typical_s: float, scatter: float, runs: int) -> None:
        """From now on these jobs are expected to be like `runs` earlier ones."""
        n = len(alike)
        self._middle_s[alike], self._spread[alike] = expect_all(
            np.full(n, typical_s), np.full(n, scatter), np.full(n, runs), self.limit_s[alike], self._usual
        )
        for all_jobs, new in zip(self.before, self._before(alike), strict=True):
            all_jobs[alike] = new

    def _before(self, jobs: Ints) -> Range:
        found = given_done(self._middle_s[jobs], self._spread[jobs], self.limit_s[jobs], np.zeros(len(jobs)))
        return Range(*(end.copy() for end in found))
