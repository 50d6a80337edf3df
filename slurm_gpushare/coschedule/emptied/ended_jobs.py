"""Hearing at once that a job has ended: a named pipe into which EpilogSlurmctld writes (prolog/epilog_slurmctld.sh)."""

from __future__ import annotations

import os
import re
import select
import stat
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.slurm.hostlist import expand

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
