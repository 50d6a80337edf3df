"""One command, profiled for one epoch by its own user, inside an allocation."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_gpushare.node.measure import Identity, Measurement
from slurm_gpushare.node.processes import Members, descendants_lister
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.record import NODE, Closed, CpuSpeed, Record, RecordKind, Scope, enough_cpus

EPOCH_FILE = "GPUSHARE_EPOCH_FILE"
_NAP_S = 3600.0  # once nothing is sampled only signals matter

Progress = Callable[[float, Mapping[str, float]], None]


def allocation(environ: Mapping[str, str], token: str | None) -> list[Identity]:
    """The cards that Slurm gave this job on this node."""
    job, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
    if not job.isdecimal() or not NODE.fullmatch(node):
        raise BadInput("profile: not inside a job on a compute node", "Run it in a batch script or with srun.")
    gpus = gpu_indices(environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or "")
    if not gpus:
        raise BadInput("profile: this job was given no GPU", "Ask for one with --gres=gpu:1.")
    return [Identity(int(job), node, gpu, Scope.COMMAND, token) for gpu in gpus]


def gpu_indices(text: str) -> list[int]:
    """``0,2-3`` -> [0, 2, 3]; empty where it is anything else."""
    found: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return []
        found.extend(range(int(first), min(int(last or first), 255) + 1))
    return found


@contextmanager
def epoch_file(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where the command may tell that its epoch is over; the node's own sampler is told too, if it wants to know."""
    with TemporaryDirectory(prefix="gpushare-", ignore_cleanup_errors=True) as directory:
        path = Path(directory, "epoch")
        try:
            yield path
        finally:
            outer = environ.get(EPOCH_FILE)
            if outer and path.exists():
                with suppress(OSError):  # the node closes its profile by itself, later
                    Path(outer).touch()


def sample_epoch(
    command: Command, identities: list[Identity], epoch: Path, *, sample_s: float, limit_s: float,
    log: Callable[[str], None], progress: Progress,
) -> list[Record]:  # fmt: skip
    """Sample until the epoch is over: the command ended, the limit passed, or the command said so."""
    measurement = Measurement(identities, Members(descendants_lister(command.pid)), limit_s=limit_s, log=log)
    started = time.monotonic()
    while measurement.profiling:
        began = time.monotonic()
        measurement.step()
        elapsed = began - started
        progress(elapsed, next(iter(measurement.runs.values())).latest)
        while (left := began + sample_s - time.monotonic()) > 0 and not command.ended:
            if command.wait(left):
                measurement.close_profile(Closed.EPOCH)
                break
        if os.path.lexists(epoch):
            measurement.close_profile(Closed.EPOCH)
        elif command.ended:
            measurement.close_profile(Closed.END)
        elif elapsed >= limit_s:
            measurement.close_profile(Closed.LIMIT)
    return measurement.records(RecordKind.FINAL)


def wait_to_the_end(command: Command) -> int:
    """Let the command go on, unmeasured; its exit code."""
    while not command.ended:
        command.wait(_NAP_S)
    return command.finish()


# A child process that its caller cannot tell from having been run directly.
#
# Same terminal, process group, descriptors and signal dispositions; signals that reach us reach it; our exit is its
# exit.


# Not ours to take: what cannot be caught, what a fault of our own raises, and what the terminal's job control needs.
_LEFT_ALONE = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXFSZ,
}  # fmt: skip
_WATCHED = signal.valid_signals() - _LEFT_ALONE
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as every shell and env(1) have it


class CannotRun(BadInput):
    """The command does not exist or cannot be executed."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command}: {error.strerror}")
        self.shell_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


class Command:
    """A running command. Make it before any thread, since signals are blocked from then on."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._status: int | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            self._child = subprocess.Popen(
                argv,
                env=dict(environ),
                close_fds=False,  # descriptors that our caller passed are meant for the command
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise CannotRun(argv[0], error) from error
        self.pid = self._child.pid

    @property
    def ended(self) -> bool:
        return self._status is not None

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it: 128 and more for a signal; None while it runs."""
        if self._status is None:
            return None
        code = os.waitstatus_to_exitcode(self._status)
        return 128 - code if code < 0 else code

    def wait(self, seconds: float) -> bool:
        """Pass signals on for so long, or until the command ends; whether SIGUSR1 told that the epoch is over."""
        info = signal.sigtimedwait(_WATCHED, max(0.0, seconds))
        if info is None:
            return False
        if info.si_signo == signal.SIGCHLD:
            self._look()
        elif info.si_signo == signal.SIGUSR1:
            return True
        elif info.si_code <= 0 and info.si_pid != self.pid:
            # From kill(2). What the terminal sends (Ctrl-C) comes from the kernel, and the command has it already.
            self._pass_on(info.si_signo)
        return False

    def _pass_on(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return  # it has just ended: SIGCHLD is on its way

    def _look(self) -> None:
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for us, so we stop when the command does
            else:
                self._status = status

    def finish(self) -> int:
        """The command's exit code; if a signal killed it, the same signal kills us."""
        assert self._status is not None
        self._child.returncode = os.waitstatus_to_exitcode(self._status)
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the command's, is enough
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        return self._child.returncode


_SHARED_MOST = 0.1
GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""

Sample = Callable[[Command, Path], Record]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One epoch on so many CPUs."""

    cpus: int
    epoch_s: float
    whole: bool
    """Whether the epoch came to its end, so that its length says how fast the command is."""
    gpu_busy_pct: float | None
    cpu_cores: float | None
    record: Record


def check_counts(counts: Sequence[int]) -> None:
    """Whether the job has so many CPUs."""
    here = len(os.sched_getaffinity(0))
    if max(counts) > here:
        raise BadInput(f"--cpus {max(counts)}: this job has {here}", f"Ask for more with -c {max(counts)}.")


def measure_curve(counts: Sequence[int], argv: Sequence[str], sample: Sample) -> Iterator[CurvePoint]:
    """The command on each number of CPUs, one after the other."""
    for count in counts:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with epoch_file(os.environ) as epoch, _on_cpus(count):
            running = Command(argv, {**os.environ, EPOCH_FILE: str(epoch)})
            began = time.monotonic()
            try:
                record = sample(running, epoch)
                epoch_s = time.monotonic() - began
                if running.ended and running.exit_code != 0:
                    raise GpushareError(f"profile: with {count} CPUs the command ended with {running.exit_code}")
            finally:
                _end(running)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield _point(count, epoch_s, record)


@contextmanager
def _on_cpus(count: int) -> Iterator[None]:
    """What is started here runs on the first so many of our CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(command: Command) -> None:
    """End the command and what it has started."""
    alive = descendants_lister(command.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if command.ended:
            return
        for pid in [*alive(), command.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        until = time.monotonic() + GRACE_S
        while not command.ended and time.monotonic() < until:
            command.wait(0.1)


def _point(cpus: int, epoch_s: float, record: Record) -> CurvePoint:
    stats = record.profile.stats
    busy, cpu = stats.get("gpu_util_pct"), stats.get("job_cpu_pct")
    return CurvePoint(
        cpus, epoch_s, record.closed in (Closed.EPOCH, Closed.END),
        busy.mean if busy else None, cpu.mean / 100.0 if cpu else None, record,
    )  # fmt: skip


def speeds(points: Sequence[CurvePoint]) -> tuple[CpuSpeed, ...]:
    """How fast it is on each number of CPUs: by its epochs, else by how busy the GPU is. Empty if nothing was seen."""
    if points and all(point.whole and point.epoch_s > 0 for point in points):
        found = [1.0 / point.epoch_s for point in points]
    elif points and all(point.gpu_busy_pct for point in points):
        found = [point.gpu_busy_pct or 0.0 for point in points]
    else:
        return ()
    return tuple(CpuSpeed(point.cpus, speed / max(found)) for point, speed in zip(points, found, strict=True))


def shared(points: Sequence[CurvePoint]) -> bool:
    """Whether a neighbour was on the card for more than a tenth of an epoch, so that its length says little of CPUs."""
    periods = [point.record.profile for point in points]
    return any(period.shared_s > _SHARED_MOST * period.seconds for period in periods)


def enough(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The fewest CPUs with which it is nearly as fast as with any."""
    curve = speeds(points)
    return next(point for point in points if point.cpus == enough_cpus(curve)) if curve else None
