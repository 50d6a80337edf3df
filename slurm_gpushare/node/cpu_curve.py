"""How fast a command is with how many CPUs: one epoch on each number of them.

Synergy (OSDI 2022) calls it the sensitivity of a job. The command runs anew for each number, on the first so many of
the job's own CPUs, and is ended when its epoch is over.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.node.processes import descendants_lister
from slurm_gpushare.node.profile import EPOCH_FILE, Command, epoch_file
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.record import Closed, CpuSpeed, Record, enough_cpus

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
