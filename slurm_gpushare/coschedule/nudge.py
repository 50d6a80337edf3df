"""When to look again: after a tick's time, or sooner when something happened that can be noticed for nothing.

Two file times are looked at: the spool's (a record arrived, so a job went on or ended) and slurmctld's saved job state
(it changes when any job does). No request is made to find out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 0.25
BUSY = 5.0
"""Never look again sooner than this many times as long as the last tick took: the helper stays a light load."""


def changed_at(paths: Iterable[Path]) -> tuple[int, ...]:
    """The files' times; 0 for one that is not there or not ours to see."""
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def watched_paths(spool_dir: Path, state_save_location: str) -> tuple[Path, ...]:
    """What to look at, given slurm.conf's StateSaveLocation."""
    return (spool_dir / "incoming", Path(state_save_location or os.devnull) / "job_state")


class Nudge:
    """Sleeps until it is time."""

    def __init__(self, paths: Iterable[Path], least_s: float = 1.0) -> None:
        self._paths = tuple(paths)
        self._least_s = least_s
        self._seen = changed_at(self._paths)

    def mark(self) -> None:
        """What happens from now on counts as news."""
        self._seen = changed_at(self._paths)

    def wait(self, tick_s: float, took_s: float, interrupted: Callable[[], bool]) -> str:
        """Wait for at most `tick_s` after a tick that took `took_s`; says what ended it."""
        begun = time.monotonic()
        least_s = min(tick_s, max(self._least_s, BUSY * took_s))
        while (waited := time.monotonic() - begun) < tick_s:
            if interrupted():
                return "signal"
            if waited >= least_s and changed_at(self._paths) != self._seen:
                return "news"
            time.sleep(min(LOOK_S, max(0.0, tick_s - waited)))
        return "tick"
