"""Which processes are the job's, as its own node knows it: from its cgroup, else from slurmd.

Never from a process's environment: that is the user's to write, and to keep private.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Slurm's places for a job: cgroup v2 (with and without a node name in the scope), then the v1 hierarchies.
_CGROUP_PLACES = (
    "system.slice/*slurmstepd.scope/job_{job}",
    "system.slice/slurmstepd.scope/*/job_{job}",
    "freezer/slurm*/uid_*/job_{job}",
    "memory/slurm*/uid_*/job_{job}",
)
_REFRESH_S = 10.0
_HASTE_S = 1.0

Lister = Callable[[], set[int]]


def cgroup_lister(job_id: int, root: Path = _CGROUP) -> Lister | None:
    """Lists the job's cgroup, or None where it has none."""
    for place in _CGROUP_PLACES:
        if found := next(root.glob(place.format(job=job_id)), None):
            return lambda: {
                int(word) for procs in found.rglob("cgroup.procs") for word in procs.read_text().split() if word != "0"
            }
    return None


def scontrol_lister(job_id: int, node: str) -> Lister:
    """Asks slurmd on this node; the name matters where several slurmd run on one machine."""

    def listed() -> set[int]:
        done = subprocess.run(
            ["scontrol", "listpids", str(job_id), node],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return parse_listpids(done.stdout, job_id)

    return listed


def parse_listpids(text: str, job_id: int) -> set[int]:
    """Process ids of ``PID JOBID STEPID LOCALID GLOBALID`` lines; whatever else is printed is passed over."""
    return {
        int(match["pid"])
        for match in re.finditer(r"^\s*(?P<pid>\d+)\s+(?P<job>\d+)\s", text, re.MULTILINE)
        if int(match["job"]) == job_id and int(match["pid"]) > 1
    }


def descendants_lister(pid: int) -> Lister:
    """A process and all who descend from it. It reads all of /proc, so it is not for a list of many."""

    def listed() -> set[int]:
        try:
            return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.Error:
            return {pid}

    return listed


def stands_still(pid: int) -> bool:
    """Whether a process is stopped, by a job's suspension or a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


class Members:
    """A set of processes, kept up to date at little cost.

    Slurm lists a job's processes with all their descendants; who starts between two listings and uses the GPU is
    known by its ancestors.
    """

    def __init__(self, lister: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._lister = lister
        self._clock = clock
        self._known: dict[int, psutil.Process] = {}
        self._foreign: dict[int, psutil.Process] = {}
        self._next = 0.0
        self._last = -_HASTE_S

    @property
    def processes(self) -> Sequence[psutil.Process]:
        return tuple(self._known.values())

    def refresh(self) -> None:
        """Forget the dead; list again if it is time to."""
        self._known = {pid: process for pid, process in self._known.items() if _alive(process)}
        self._foreign = {pid: process for pid, process in self._foreign.items() if _alive(process)}
        # While there is nobody yet, look often: the job is about to start.
        if self._clock() >= self._next or (not self._known and self._clock() - self._last >= _HASTE_S):
            self._list()

    def owns(self, pid: int) -> bool | None:
        """Whether a process that is on the GPU belongs here; None while that is not known yet."""
        if pid in self._known:
            return True
        if pid in self._foreign:
            return False
        try:
            process = psutil.Process(pid)
            if any(parent.pid in self._known for parent in process.parents()):
                self._known[pid] = process
                return True
        except psutil.Error:
            return None  # it is gone already
        if self._clock() - self._last < _HASTE_S:
            return None  # listed a moment ago: the next listing will tell
        self._list()
        if pid not in self._known:
            self._foreign[pid] = process
        return pid in self._known

    def _list(self) -> None:
        self._last = self._clock()
        self._next = self._last + _REFRESH_S
        try:
            listed = set(self._lister())
        except (OSError, subprocess.SubprocessError):
            return  # slurmd restarting, cgroup going away: what we knew is still the best there is
        for pid in listed - self._known.keys():
            try:
                self._known[pid] = psutil.Process(pid)
                self._foreign.pop(pid, None)
            except psutil.Error:
                continue


def _alive(process: psutil.Process) -> bool:
    """`is_running` compares start times, so a pid that was given to somebody else is not taken for the old one."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
