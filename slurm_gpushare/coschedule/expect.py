"""What is expected of a running job: how long it still runs, and how much delay it may still be asked to bear."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.coschedule.settings import PolicySettings

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LIMIT_SCATTER = 0.5
"""Standard deviation of the logarithm of what jobs use of their limits."""


def left_s(expected_s: Floats, only_limit: Bools, done_s: Floats, limit_left_s: Floats, limit_use: float) -> Floats:
    """Alone-time still to run, after `done_s` of it.

    Where only the limit is known, or the job outlives what was expected, a fixed part of what is left of the limit.
    """
    return np.where(only_limit | (done_s >= expected_s), limit_use * limit_left_s, expected_s - done_s)


def from_history_s(typical_s: Floats, scatter: Floats, limit_s: Floats, limit_use: float) -> Floats:
    """Expected duration from a token's earlier runs and the job's limit, each weighed by how far it is usually off.

    `scatter` is the standard deviation of the logarithm of the earlier durations: runs of one token that differ
    wildly say little, and then the limit says more.
    """
    history, limit = 1.0 / np.maximum(scatter, 0.05) ** 2, 1.0 / LIMIT_SCATTER**2
    log_s = (history * np.log(typical_s) + limit * np.log(limit_use * limit_s)) / (history + limit)
    return np.minimum(np.exp(log_s), limit_s)


def budget_s(run_s: Floats, done_s: Floats, lost_s: Floats, promise_pct: Floats) -> Floats:
    """Delay still to spend: the promised part of the whole run, less what past guests have cost.

    Of a run without a known end only the part that is done counts.
    """
    certain = np.where(np.isfinite(run_s), run_s, done_s)
    left: Floats = promise_pct / 100.0 * certain - lost_s
    return left


def longest_guest_s(mean_duration_s: float, settings: PolicySettings) -> float:
    """Guests are short: a long one would hold for days a lane that hundreds of short ones could pass through."""
    return np.inf if settings.objective == "saving" else settings.express_factor * mean_duration_s
