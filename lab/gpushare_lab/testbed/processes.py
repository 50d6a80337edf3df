"""Finding and ending processes by pid, without ever meeting somebody else's.

A pid may have been given to another process by now, so a process is known by its pid and its start
time together. Those of a testbed also carry its directory in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gpushare_lab.testbed.layout import MARKER
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import replace_text

_POLL_S = 0.02
_STATE, _PARENT, _START = 0, 1, 19  # in /proc/PID/stat, after the name in parentheses


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition`; whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _stat(pid: int) -> list[str] | None:
    try:
        # The name in parentheses may hold any bytes, and comes from anybody's process.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in "ZX" else fields  # a zombie runs no more


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if it does not run."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else None


def write_pid(pid_file: Path, pid: int) -> None:
    replace_text(pid_file, f"{pid} {start_ticks(pid) or 0}\n")


def recorded_pid(pid_file: Path) -> int | None:
    """The pid in `pid_file` if that very process still runs."""
    try:
        pid, ticks = (int(word) for word in pid_file.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    return pid if start_ticks(pid) == ticks else None


def marked_pids(directory: Path, word: bytes = b"") -> set[int]:
    """Every process that carries this testbed's mark, except ourselves and those we descend from.

    This finds what pid files cannot: job steps, samplers, and daemons whose `up` was killed
    between starting them and writing it down. With a `word`, only those that have it in their command line.
    """
    pids = {pid for pid in _all_pids() if word in _command_line(pid)} if word else _all_pids()
    return {pid for pid in pids - _lineage() if _is_marked(pid, directory) and _stat(pid)}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""  # it ended


def _is_marked(pid: int, directory: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        if os.fsencode(f"{MARKER}={directory}") in (process / "environ").read_bytes().split(b"\0"):
            return True
        # slurmstepd writes its title over its environment, and belongs to no slurmd: its log tells whose it is.
        if (process / "comm").read_bytes().strip() != b"slurmstepd":  # a process may call itself anything
            return False
        return any(os.readlink(entry).startswith(f"{directory}/") for entry in (process / "fd").iterdir())
    except OSError:
        return False  # it ended, or is the kernel's


def with_descendants(pids: Iterable[int]) -> set[int]:
    """`pids` and all their children's children: a job may have cleared its environment."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        if fields := _stat(pid):
            children.setdefault(int(fields[_PARENT]), []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found - _lineage()


def stop_pids(pids: Iterable[int], grace_s: float = 3.0) -> None:
    """SIGTERM to all, SIGKILL to those that are still there after `grace_s`."""
    alive = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}

    def gone() -> bool:
        for pid in list(alive):
            _reap(pid)
            if start_ticks(pid) != alive[pid]:
                del alive[pid]
        return not alive

    for signal_number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
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
        return  # somebody else's child


def _all_pids() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}


def _lineage() -> set[int]:
    """Ourselves, our parent, and so on: ``testbed run -- gpushare-lab testbed down`` must not end itself."""
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        fields = _stat(pid)
        pid = int(fields[_PARENT]) if fields else 0
    return pids
