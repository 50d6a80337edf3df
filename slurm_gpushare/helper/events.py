"""When to look again: after a tick's time, or sooner when something happened that can be noticed for nothing.

Two file times are looked at: the spool's (a record arrived, so a job went on or ended) and slurmctld's saved job state
(it changes when any job does). No request is made to find out.
"""

from __future__ import annotations

import math
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.node.delivery import INCOMING
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.slurm.values import expand

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


# Hearing at once that a job has ended: a named pipe into which EpilogSlurmctld writes (prolog/epilog_slurmctld.sh).


_LINE = re.compile(r"([0-9]{1,10}) (\S{1,1000})", re.ASCII)
_MOST_BYTES = 65536


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, and where its epilog runs."""

    raw_id: int
    nodes: tuple[str, ...]


def parse_ended(text: str) -> list[EndedJob]:
    """One job a line, its id and its node list; anything else is skipped."""
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [EndedJob(int(line[1]), tuple(expand(line[2]))) for line in found if line]


class EndedJobs:
    """The reading end of ``StateDir/ended``. Only SlurmUser, who runs slurmctld and the helper, may open it."""

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / "ended"
        try:
            if path.exists() and not stat.S_ISFIFO(path.lstat().st_mode):
                path.unlink()
            if not path.exists():
                os.mkfifo(path, 0o600)
            # For writing too: then reading never says that everybody has closed it.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as why:
            raise GpushareError(
                f"{path}: {why.strerror}", "StateDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why
        self._wake, self._waker = os.pipe()
        self._rest = b""

    def wait(self, timeout_s: float) -> list[EndedJob]:
        """The jobs that ended since the last call; returns early when one does, or when `interrupt` is called."""
        ready, _, _ = select.select([self._pipe, self._wake], [], [], timeout_s)
        if self._wake in ready:
            os.read(self._wake, 1)
        if self._pipe not in ready:
            return []
        whole, newline, self._rest = (self._rest + os.read(self._pipe, _MOST_BYTES)).rpartition(b"\n")
        if len(self._rest) > _MOST_BYTES:
            self._rest = b""
        return parse_ended(whole.decode("ascii", "replace")) if newline else []

    def interrupt(self) -> None:
        """End a `wait` of another thread."""
        os.write(self._waker, b"x")

    def close(self) -> None:
        for handle in (self._pipe, self._wake, self._waker):
            os.close(handle)
