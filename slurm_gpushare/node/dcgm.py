"""DCGM's job mapping: a file for each card, a line for each job on it. Prolog and epilog write it (prolog/common.sh).

A prolog is not told all cards of a job that has several whole ones: where each card has a type of its own, Slurm from
23.11 on sets SLURM_JOB_GPUS to those of the last type. The sampler sees on which cards the job's processes are.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

_LOCK = ".gpushare.lock"  # the prolog's too
_LOCK_S = 0.2


def map_job(directory: Path, job_id: int, gpus: Collection[int], runs: Callable[[], bool]) -> bool:
    """Add the job to the files of these cards; False if another writer was in the way, and it should be tried again.

    `runs`: whether the epilog has not come yet. It says so before it takes the job's lines away, under the same lock.
    """
    with os.fdopen(os.open(directory / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
        if not _take(lock.fileno()):
            return False
        if not runs():
            return True
        for gpu in gpus:
            path = directory / str(gpu)
            lines = path.read_text().splitlines() if path.exists() else []
            if str(job_id) not in lines:
                # In place, and readable: exporters watch the file itself.
                path.write_text("".join(f"{line}\n" for line in [*lines, str(job_id)]))
                path.chmod(0o644)
    return True


def _take(lock: int) -> bool:
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        else:
            return True
