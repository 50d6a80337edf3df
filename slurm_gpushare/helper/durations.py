"""How long a job runs alone: a distribution, from its token's earlier runs, its time limit and what it has done so far.

The logarithm of the duration is taken to be normal, cut off at the time limit and at what is done already. The
pessimistic ends decide about promises, the middle about gains. Helper and simulator use this module and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from slurm_gpushare.helper.snapshot import Occupant, PendingJob, Snapshot
from slurm_gpushare.knowledge.rates import Floats, Ints
from slurm_gpushare.protocol.policy import PolicySettings

LIMIT_USE = 0.5
"""The part of a time limit that a job is expected to use, where only the limit is known."""
LIMIT_SPREAD = 0.5
"""Standard deviation of the logarithm of what jobs use of their limits."""
RUN_SPREAD = 0.7
"""The same of two runs of one token, until its own runs say better: a first run is often a test."""
SITE_RUNS = 20.0
"""So many second runs of a site's tokens say as much about how far runs differ there as `RUN_SPREAD` does."""
PESSIMISTIC = 0.1
"""A promise counts with a run as short as one in ten is, or as long as one in ten is, whichever is worse for it."""
OUTLIVED = 1.645
"""So many standard deviations past its expectation (one in twenty), a job is not what it was: its limit says more."""


class Expectation(NamedTuple):
    """The duration of a job before it starts: the middle, and the standard deviation of its logarithm."""

    middle_s: float = math.inf
    spread: float = 0.0
    """0: known exactly."""


class UsualScatter(NamedTuple):
    """How far runs of one token differ at this site."""

    scatter: float = RUN_SPREAD
    weight: float = 1.0
    """As how many of a token's own runs that counts."""


UNKNOWN_SITE = UsualScatter()


class Range(NamedTuple):
    """Three ends of the duration of each job, by column: short, middle, long."""

    low_s: Floats
    middle_s: Floats
    high_s: Floats


def usual_scatter(scatter: Floats, runs: Ints) -> UsualScatter:
    """What the site's tokens say about runs of one token; `scatter` and `runs` are by token.

    It can only lower the trust in history. Where the runs of most tokens differ, a few runs that agree may have been
    submitted together and say little about the next one. Where runs agree, a first run may still be a test. Rounded,
    so that what follows from it need not be worked out anew with each job that ends.
    """
    several = runs > 1
    again = float((runs[several] - 1).sum())
    squares = SITE_RUNS * RUN_SPREAD**2 + float((runs * scatter**2)[several].sum())
    variance = max(RUN_SPREAD**2, squares / (SITE_RUNS + again))
    return UsualScatter(
        round(math.sqrt(variance), 1), float(round(1.0 + again / SITE_RUNS * (1.0 - RUN_SPREAD**2 / variance)))
    )


@lru_cache(maxsize=65536)
def expect(
    typical_s: float | None, scatter: float | None, runs: int, limit_s: float, usual: UsualScatter = UNKNOWN_SITE
) -> Expectation:
    """The expectation of one job; `typical_s` is None where its token has no whole run alone yet."""
    history = np.array([math.nan if typical_s is None or typical_s <= 0 else typical_s])
    middle_s, spread = expect_all(history, np.array([scatter or 0.0]), np.array([runs]), np.array([limit_s]), usual)
    return Expectation(float(middle_s[0]), float(spread[0]))


def expect_all(
    typical_s: Floats, scatter: Floats, runs: Ints, limit_s: Floats, usual: UsualScatter = UNKNOWN_SITE
) -> tuple[Floats, Floats]:
    """Middles and spreads of many jobs, from history (NaN: none) and limits (inf: none).

    Both count by how far each is usually off. `scatter` is the standard deviation of the logarithm of the token's
    earlier durations; of few runs the usual scatter counts too. Where history and limit contradict each other by
    more than both are usually off, neither is trusted and the spread grows, the less the more runs agree (a generous
    limit is how most people use limits) and the better it is known that runs differ here.
    """
    known, limited = np.isfinite(typical_s), np.isfinite(limit_s)
    n = np.maximum(runs, 1).astype(float)
    own = (usual.weight * usual.scatter**2 + n * scatter**2) / (n + usual.weight)
    of_history = own * (1.0 + 1.0 / n)
    # Runs that agree tell how this token uses its limits; what other jobs do of theirs then counts less.
    agree = 1.0 + (n - 1.0) * np.maximum(0.0, 1.0 - own / RUN_SPREAD**2)
    of_limit = LIMIT_SPREAD**2 * agree
    # Beside a limit, runs that differ more than runs usually do say ever less.
    beside = of_history * np.maximum(1.0, of_history / RUN_SPREAD**2)
    with np.errstate(invalid="ignore"):
        history, limit = np.log(np.where(known, typical_s, 1.0)), np.log(LIMIT_USE * limit_s)
        middle = (history / beside + limit / of_limit) / (1.0 / beside + 1.0 / of_limit)
        apart = (history - limit) ** 2 / (beside + of_limit)
        both = np.maximum(1.0, apart) ** (1.0 / np.maximum(agree, usual.weight)) / (1.0 / beside + 1.0 / of_limit)
    middle = np.where(known & limited, middle, np.where(known, history, np.where(limited, limit, np.inf)))
    variance = np.where(known & limited, both, np.where(known, of_history, LIMIT_SPREAD**2))
    return np.exp(middle), np.sqrt(variance)


def given_done(middle_s: Floats, spread: Floats, limit_s: Floats, done_s: Floats) -> Range:
    """Short, middle and long end of the whole durations of jobs that have done `done_s` (alone-time) already.

    `limit_s` is alone-time too: without what was given back for sharing. Without any end in sight the short end is
    what is done, and the others are infinite.
    """
    if not spread.any() and ((done_s <= middle_s) & np.isfinite(middle_s)).all():
        return Range(middle_s, middle_s, middle_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        done, limit = np.log(done_s), np.log(limit_s)
        outlived = done > np.log(middle_s) + OUTLIVED * spread
        # Without a limit, what it has done is all there is to go by: what has run for long will run for as long again.
        otherwise_s = np.where(np.isfinite(limit_s), LIMIT_USE * limit_s, 2.0 * done_s)
        middle = np.where(outlived, np.log(otherwise_s), np.log(middle_s))
        sd = np.maximum(np.where(outlived, LIMIT_SPREAD, spread), 1e-6)
        longer, over = ndtr((middle - done) / sd), ndtr((middle - limit) / sd)
        ends = [
            np.exp(middle - sd * ndtri(longer - part * (longer - over))) for part in (PESSIMISTIC, 0.5, 1 - PESSIMISTIC)
        ]
    endless = ~np.isfinite(middle)
    low, mid, high = (np.clip(np.where(endless, np.inf, end), done_s, np.maximum(limit_s, done_s)) for end in ends)
    return Range(np.where(endless, done_s, low), mid, high)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What running jobs have before them, by column."""

    done_s: Floats
    left: Range
    """Alone-time still to run."""

    @classmethod
    def of(cls, middle_s: Floats, spread: Floats, limit_s: Floats, done_s: Floats) -> Ahead:
        total = given_done(middle_s, spread, limit_s, done_s)
        return cls(done_s, Range(*(np.maximum(end - done_s, 0.0) for end in total)))

    def budget_s(self, promise_pct: Floats, lost_s: Floats) -> Floats:
        """Delay still to spend: the promised part of the run if it is short, less what past guests have cost."""
        return promise_pct / 100.0 * (self.done_s + self.left.low_s) - lost_s

    def expected_budget_s(self, promise_pct: Floats, lost_s: Floats) -> Floats:
        """The same of the run as it is expected; of one without an end in sight what is done counts."""
        left_s = np.where(np.isfinite(self.left.middle_s), self.left.middle_s, self.left.low_s)
        return promise_pct / 100.0 * (self.done_s + left_s) - lost_s

    def bears(self, promise_pct: Floats, lost_s: Floats) -> Floats:
        """Delay for each second left that fits the promise if somebody stays to the end, be that soon or late."""
        part, found = promise_pct / 100.0, np.full(len(self.done_s), np.inf)
        for left_s in (self.left.low_s, self.left.high_s):
            with np.errstate(invalid="ignore"):
                here = (part * self.done_s - lost_s) / np.maximum(left_s, 1e-9) + part
            found = np.minimum(found, np.where(np.isfinite(left_s), here, -1.0))
        return found


def longest_guest_s(mean_duration_s: float, settings: PolicySettings) -> float:
    """Guests are short: a long one would hold for days a lane that hundreds of short ones could pass through."""
    return np.inf if settings.objective == "saving" else settings.express_factor * mean_duration_s


# How long the jobs submitted lately are: what "short" means for a guest.


HALF_LIFE_JOBS = 1000


def mean_duration_s(snapshot: Snapshot, width: int) -> float:
    """What plan and reasons go by: the mean of the jobs submitted lately, else of those in the snapshot."""
    if width in snapshot.mean_duration_s:
        return snapshot.mean_duration_s[width]
    known = [s for of, s in _expected_s(snapshot).values() if of == width and math.isfinite(s)]
    return sum(known) / len(known) if known else 0.0


def _expected_s(snapshot: Snapshot) -> dict[str, tuple[int, float]]:
    """Widths and expected durations of the sharers that wait or run, by key."""
    jobs: list[PendingJob | Occupant] = [*snapshot.pending, *(job for gpu in snapshot.gpus for job in gpu.occupants)]
    return {job.key: (job.workload.width, job.workload.expected_s) for job in jobs if job.workload.token is not None}


class RecentDurations:
    """A running mean of expected durations for each width, each job counted once, old ones fading.

    The jobs in one snapshot alone would mislead: short ones come and go between two looks, long ones stay.
    """

    def __init__(self) -> None:
        self._seen: frozenset[str] = frozenset()
        self._weight: defaultdict[int, float] = defaultdict(float)
        self._sum_s: defaultdict[int, float] = defaultdict(float)

    def mean_s(self, snapshot: Snapshot) -> Mapping[int, float]:
        """By width, the mean after this look, of those of which a job with a known duration was seen."""
        durations = _expected_s(snapshot)
        keep = 0.5 ** (1.0 / HALF_LIFE_JOBS)
        for key in durations.keys() - self._seen:
            width, expected_s = durations[key]
            if math.isfinite(expected_s):
                self._weight[width] = self._weight[width] * keep + 1.0
                self._sum_s[width] = self._sum_s[width] * keep + expected_s
        self._seen = frozenset(durations)
        return {width: self._sum_s[width] / weight for width, weight in self._weight.items()}
