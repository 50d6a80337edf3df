"""When to look again: after a tick's time, or sooner when something happened that can be noticed for nothing.

Two file times are looked at: the spool's (a record arrived, so a job went on or ended) and slurmctld's saved job state
(it changes when any job does). No request is made to find out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slurm_gpushare.telemetry.spool import INCOMING

LOOK_S = 0.25
REST = 2.0
"""Wait at least this many times as long as the last tick took: slurmctld and the helper's host get a rest."""
REST_BEFORE_NEWS = 5.0
"""The same for news, which cannot shorten a tick's time further than to this."""


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
    return (spool_dir / INCOMING, Path(state_save_location or os.devnull) / "job_state")


class Wakeup:
    """Sleeps until it is time."""

    def __init__(self, paths: Iterable[Path], least_s: float = 1.0) -> None:
        self._paths = tuple(paths)
        self._least_s = least_s
        self._seen = changed_at(self._paths)

    def mark(self) -> None:
        """What happens from now on counts as news."""
        self._seen = changed_at(self._paths)

    def wait(
        self,
        tick_s: float,
        took_s: float,
        interrupted: Callable[[], bool],
        *,
        for_news: bool = True,
        longest_rest_s: float = math.inf,
    ) -> str:
        """Wait for `tick_s`, or for less if there is news, after a tick that took `took_s`; says what ended it."""
        begun = time.monotonic()
        tick_s = max(tick_s, min(REST * took_s, longest_rest_s))
        least_s = min(tick_s, max(self._least_s, REST_BEFORE_NEWS * took_s))
        while (waited := time.monotonic() - begun) < tick_s:
            if interrupted():
                return "signal"
            if for_news and waited >= least_s and changed_at(self._paths) != self._seen:
                return "news"
            time.sleep(min(LOOK_S, max(0.0, tick_s - waited)))
        return "tick"
