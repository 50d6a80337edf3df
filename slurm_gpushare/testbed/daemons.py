"""Processes that outlive the command that started them: start, find again, stop, all by pid.

A pid alone may have been given to somebody else by now, so each pid file also holds the process's
start time, and only a process with both is ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.testbed.layout import MARKER

_POLL_S = 0.02


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition`; whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def last_lines(path: Path, count: int = 5) -> str:
    """The end of a log on one line, for an error message."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 4000))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log"
    return " | ".join(line.strip() for line in lines[-count:] if line.strip()) or "the log is empty"


@dataclass
class Daemon:
    """One background process with a pid file and a log."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    run_dir: Path
    log: Path
    ready: Callable[[], bool]
    timeout_s: float = 30.0
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
        draft = self.pid_file.with_suffix(".new")
        draft.write_text(f"{self._child.pid} {start_ticks(self._child.pid) or 0}\n")
        draft.rename(self.pid_file)

    def wait_ready(self) -> None:
        if not wait_until(lambda: self.pid() is None or self.ready(), self.timeout_s):
            raise GpushareError(
                f"{self.name}: not ready after {self.timeout_s:g} s: {last_lines(self.log)}", f"See {self.log}."
            )
        if self.pid() is None:
            raise GpushareError(f"{self.name}: died at start: {last_lines(self.log)}", f"See {self.log}.")

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end if it is one that ends."""
        if (pid := self.pid()) is not None:
            os.kill(pid, signal_number)
            wait_until(lambda: self.pid() is None, 10)

    def stop(self, grace_s: float = 10.0) -> None:
        if (pid := self.pid()) is not None:
            stop_pids([pid], grace_s)
            self.pid()
        self.pid_file.unlink(missing_ok=True)


def recorded_pid(pid_file: Path) -> int | None:
    """The pid in `pid_file` if that very process still runs."""
    try:
        pid, ticks = (int(word) for word in pid_file.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    return pid if start_ticks(pid) == ticks else None


def stop_pids(pids: Iterable[int], grace_s: float = 3.0) -> None:
    """SIGTERM to all, SIGKILL to those that are still there after `grace_s`."""
    alive = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}

    def gone() -> bool:
        for pid in list(alive):
            _reap(pid)
            if start_ticks(pid) != alive[pid]:
                del alive[pid]
        return not alive

    for signal_number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in list(alive):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                del alive[pid]
        if wait_until(gone, wait_s):
            return
    raise GpushareError(f"testbed: processes that do not die: {', '.join(map(str, alive))}")


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # somebody else's child: init reaps it


def marked_pids(directory: Path) -> list[int]:
    """Every process that carries this testbed's mark in its environment, ourselves excepted.

    This finds what pid files cannot: job steps, samplers, and daemons whose `up` was killed
    between starting them and writing it down.
    """
    mark = os.fsencode(f"{MARKER}={directory}")
    own = {os.getpid(), os.getppid()}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in own:
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended, or is the kernel's
        if mark in environ.split(b"\0"):
            found.append(int(entry.name))
    return found
