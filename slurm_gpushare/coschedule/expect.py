"""What is expected of a running job: how long it still runs, and how much delay it may still be asked to bear."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_gpushare.coschedule.settings import PolicySettings

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def left_s(expected_s: Floats, only_limit: Bools, done_s: Floats, limit_left_s: Floats, limit_use: float) -> Floats:
    """Alone-time still to run, after `done_s` of it.

    Where only the limit is known, or the job outlives what was expected, a fixed part of what is left of the limit.
    """
    return np.where(only_limit | (done_s >= expected_s), limit_use * limit_left_s, expected_s - done_s)


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
