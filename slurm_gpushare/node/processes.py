"""Which processes are the job's, and how they stop and go on.

Its own node knows them: from its cgroup, else from slurmd. Never from a process's environment: that is the user's to
write, and to keep private.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Slurm's places for a job: cgroup v2 (with and without a node name in the scope), then the v1 hierarchies.
_CGROUP_PLACES = (
    "system.slice/*slurmstepd.scope/job_{job}",
    "system.slice/slurmstepd.scope/*/job_{job}",
    "freezer/slurm*/uid_*/job_{job}",
    "memory/slurm*/uid_*/job_{job}",
)
# From the root on: below a place of their own users can make a group of any name, also that of another's job.
_JOB_OF_CGROUP = re.compile(
    r"^\d+:[^:]*:(?:/system\.slice/[^/]*slurmstepd\.scope(?:/[^/]+)?|/slurm[^/]*/uid_\d+)/job_(\d+)(?:/|$)",
    re.MULTILINE,
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


def is_outsider(pid: int, neighbours: Mapping[int, int | None] | None) -> bool:
    """Whether a process that is on a card, and not ours, is of none of its other jobs either.

    `neighbours` are these jobs with their owners' uids; None, or a job's None, where that is not known. A process is a
    job's if it is in the job's cgroup, or in none and its owner's: who leaves a job is not taken for somebody else.
    """
    if neighbours is None or None in neighbours.values():
        return False
    try:
        if found := _JOB_OF_CGROUP.search(Path(f"/proc/{pid}/cgroup").read_text()):
            return int(found[1]) not in neighbours
        return psutil.Process(pid).uids().real not in neighbours.values()
    except (OSError, psutil.Error):
        return False  # it is gone already


def has_left(pid: int, owner_uid: int) -> bool:
    """Whether a process that Slurm does not list is the owner's all the same, and in no job's cgroup."""
    try:
        in_a_job = _JOB_OF_CGROUP.search(Path(f"/proc/{pid}/cgroup").read_text())
        return not in_a_job and psutil.Process(pid).uids().real == owner_uid
    except (OSError, psutil.Error):
        return False


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


# Stopping a job: all processes that Slurm lists for it, again at each look. `scontrol suspend` would give its CPUs to
# others, and `scancel -s STOP` leaves steps and sessions of their own running.

_PASSES = 4
"""Processes may start others while they are being stopped."""
_SETTLES_S = 3.0
"""Kernels that were launched before a stop run to their end."""
_RENEWALS = 2
"""So many renewals after a job went on by itself, the queue has surely been looked at since: it is not ending."""
_STOPPED, _GONE, _UNTOLD = b"Tt", b"ZXx", b"D"

# Lets go whom we hold if we die: the last line names the processes, an empty one none.
_GUARDIAN = 'while read -r line; do held=$line; done; [ -z "$held" ] || kill -CONT $held 2>/dev/null'


class ProcessState(NamedTuple):
    """Of one process: its state's letter, and when it started (clock ticks after boot)."""

    letter: bytes
    start: bytes


def process_state(pid: int) -> ProcessState | None:
    """None if there is no such process, or if it is slurmstepd, which is root's and must never stand still."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        name, _, rest = text.partition(b"(")[2].rpartition(b")")
        if name == b"slurmstepd" and b"\nUid:\t0\t" in Path(f"/proc/{pid}/status").read_bytes():
            return None
    except OSError:
        return None
    words = rest.split()
    return ProcessState(words[0], words[19])


def stands_still(pid: int) -> bool:
    """Whether a process is stopped, by whomever."""
    state = process_state(pid)
    return state is not None and state.letter in _STOPPED


@dataclass(slots=True)
class _Held:
    """A process that we have told to stop."""

    start: bytes
    stood: bool = False
    """Whether it was seen to stand still since."""


class JobStop:
    """Keeps a job standing still while it is ordered to.

    A job that goes on meanwhile may be ending (Slurm sends CONT before TERM), or its owner has let it go on: it is
    stopped again once the order has been renewed twice, which the helper does for jobs that run.
    """

    def __init__(self, lister: Lister, clock: Callable[[], float] = time.monotonic) -> None:
        self._lister = lister
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._began_s = self._counted_s = 0.0
        self._free_until = 0
        self.stopped_s = 0.0
        """How long it has stood still by our doing, in all."""
        self.woken = 0
        """Looks at which it was found at work in a stop."""

    @property
    def holds(self) -> bool:
        """Whether processes stand still by our doing."""
        return bool(self._held)

    def look(self, ordered: bool, renewals: int, worked: bool = False) -> None:
        """Do what the order says now. `worked`: its processes have used a GPU since the last look."""
        if not ordered:
            self.let_go()
            return
        if self._is_awake(worked):
            self.woken += 1
            self._free_until = renewals + _RENEWALS
            self._counted_s = self._clock()  # the time since the last look was no pause
            self.let_go()
        if renewals >= self._free_until:
            self._stop()
        self._count()

    def let_go(self) -> None:
        """Everybody whom we stopped goes on."""
        self._count()
        for pid, held in self._held.items():
            if (state := process_state(pid)) is not None and state.start == held.start:
                _signal(pid, signal.SIGCONT)
        if self._held:
            self._held = {}
            self._tell_guardian(())

    def close(self) -> None:
        """Let everybody go on, for good."""
        self.let_go()
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def _count(self) -> None:
        now_s = self._clock()
        if self._held:
            self.stopped_s += now_s - self._counted_s
        self._counted_s = now_s

    def _is_awake(self, worked: bool) -> bool:
        """Whether one of those who stood still does not any more. What waits for a disk tells neither.

        One that has ended was let go first, or killed: in either case the job may be ending, and those whom Slurm does
        not reach (workers in sessions of their own) must not stand still until it kills them.
        """
        awake = False
        for pid, held in list(self._held.items()):
            state = process_state(pid)
            if state is None or state.start != held.start or state.letter in _GONE:
                del self._held[pid]
                awake = awake or held.stood
            elif state.letter in _STOPPED:
                held.stood = True
            else:
                awake = awake or (held.stood and state.letter not in _UNTOLD)
        return awake or (bool(self._held) and worked and self._clock() - self._began_s > _SETTLES_S)

    def _stop(self) -> None:
        """Stop who does not stand still yet; who was stopped by its owner is left to its owner."""
        begins = not self._held
        for _ in range(_PASSES):
            try:
                new = self._listed()
            except (OSError, subprocess.SubprocessError):
                break  # slurmd restarts: the next look stops who is new
            # First the guardian: whoever stands still must be let go, whatever becomes of us.
            if not new or not self._tell_guardian((*self._held, *new)):
                break
            self._held |= {pid: _Held(start) for pid, start in new.items()}
            for pid in new:
                _signal(pid, signal.SIGSTOP)
        for pid, held in self._held.items():
            if not held.stood:
                _signal(pid, signal.SIGSTOP)
        if begins and self._held:
            self._began_s = self._counted_s = self._clock()
            while self._clock() < self._began_s + 0.1 and not all(map(stands_still, self._held)):
                time.sleep(0.005)  # a stop takes effect when its process is next to run
        for pid, held in self._held.items():  # now, since at the next look Slurm may have let it go on to end it
            held.stood = held.stood or stands_still(pid)

    def _listed(self) -> dict[int, bytes]:
        """The job's processes that run and are not held yet, with their start times."""
        pids = set(self._lister()) - self._held.keys()
        found = {pid: state for pid in pids if (state := process_state(pid)) is not None}
        return {pid: state.start for pid, state in found.items() if state.letter not in _STOPPED + _GONE}

    def _tell_guardian(self, pids: Collection[int]) -> bool:
        """Whether it knows now whom to let go."""
        try:
            if self._guardian is None:
                argv = ["/bin/sh", "-c", _GUARDIAN]
                self._guardian = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
            assert self._guardian.stdin is not None
            self._guardian.stdin.write(b"%s\n" % b" ".join(b"%d" % pid for pid in pids))
            self._guardian.stdin.flush()
        except OSError:
            self._guardian = None
            return False
        return True


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return  # it is gone, or a setuid program beside a sampler that is not root's
