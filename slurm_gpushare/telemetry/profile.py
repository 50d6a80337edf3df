"""One command, profiled for one epoch by its own user, inside an allocation."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slurm_gpushare.errors import BadInput
from slurm_gpushare.telemetry.command import Command
from slurm_gpushare.telemetry.measure import Measurement
from slurm_gpushare.telemetry.processes import Members, descendants_lister
from slurm_gpushare.telemetry.record import Closed, Record, RecordKind, Scope
from slurm_gpushare.telemetry.record_json import NODE
from slurm_gpushare.telemetry.run import Identity

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
    directory = Path(tempfile.mkdtemp(prefix="gpushare-"))
    path = directory / "epoch"
    try:
        yield path
    finally:
        outer = environ.get(EPOCH_FILE)
        if outer and path.exists():
            try:
                Path(outer).touch()
            except OSError:
                outer = None  # the node closes its profile by itself, later
        shutil.rmtree(directory, ignore_errors=True)


def sample_epoch(
    command: Command, identities: list[Identity], epoch: Path, *, sample_s: float, limit_s: float,
    log: Callable[[str], None], progress: Progress,
) -> list[Record]:  # fmt: skip
    """Sample until the epoch is over: the command ended, the limit passed, or the command said so."""
    measurement = Measurement(
        identities, Members(descendants_lister(command.pid)), limit_s=limit_s, neighbours=lambda _: (), log=log
    )
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
