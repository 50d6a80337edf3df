"""A background process that outlives the command that started it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_lab.testbed.processes import recorded_pid, stop_pids, wait_until, write_pid
from slurm_gpushare.protocol.errors import GpushareError


def last_lines(path: Path, count: int = 4) -> str:
    """The end of a log on one line, for an error message."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 4000))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log"
    return " | ".join(line.strip() for line in lines[-count:] if line.strip()) or "the log is empty"


@dataclass
class Background:
    """One background process with a pid file and a log."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    run_dir: Path
    log: Path
    ready: Callable[[], bool]
    timeout_s: float = 180.0
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid_file(self) -> Path:
        return self.run_dir / f"{self.name}.pid"

    def pid(self) -> int | None:
        """The daemon's pid if it runs."""
        if self._child is not None:
            self._child.poll()  # reap it, if it died
        return recorded_pid(self.pid_file)

    def start(self) -> None:
        """Start it and return at once; `wait_ready` follows."""
        try:
            with self.log.open("ab") as log:
                self._child = subprocess.Popen(
                    list(self.argv),
                    env=dict(self.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            write_pid(self.pid_file, self._child.pid)
        except OSError as why:
            raise GpushareError(
                f"{self.name}: cannot start: {why}", "Are all packages of scripts/setup.sh there?"
            ) from why

    def wait_ready(self) -> None:
        if not wait_until(lambda: self.pid() is None or self.ready(), self.timeout_s):
            raise GpushareError(f"{self.name}: not ready after {self.timeout_s:g} s: {last_lines(self.log)}")
        if self.pid() is None:
            raise GpushareError(f"{self.name}: died at start: {last_lines(self.log)}")

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        if (pid := self.pid()) is not None:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: self.pid() is None, 60)

    def stop(self, grace_s: float = 60.0) -> None:
        if (pid := self.pid()) is not None:
            stop_pids([pid], grace_s)
            self.pid()
        self.pid_file.unlink(missing_ok=True)
