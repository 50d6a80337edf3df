"""How long a pending job can expect to wait for a whole GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FOREVER_S = 1e9  # a job without a time limit; a number, since infinity cannot be reckoned with


def expected_waits_s(free_in_s: Floats, work_s: Floats) -> Floats:
    """Expected wait of each pending job, in queue order, if cards go to them one after the other.

    `free_in_s` says in how many seconds each card is free, `work_s` how long each pending job will hold one. The
    queue is taken as a fluid that fills the cards as they come free: job i starts when the capacity freed until then
    equals the work ahead of it, and not before the first card is free.
    """
    if len(free_in_s) == 0:
        return np.full(len(work_s), np.inf)
    free = np.minimum(np.sort(free_in_s), FOREVER_S)
    capacity = np.concatenate([[0.0], np.cumsum(np.diff(free) * np.arange(1, len(free)))])  # freed by each free[i]
    ahead = np.cumsum(work_s) - work_s
    beyond = np.maximum(ahead - capacity[-1], 0.0) / len(free)  # all cards work on the queue from free[-1] on
    waits: Floats = np.interp(ahead, capacity, free) + beyond
    return waits
