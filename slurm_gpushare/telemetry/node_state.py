"""What prolog, epilog and sampler leave each other under StateDir (the shell's half is prolog/common.sh).

    nodes/NODE/jobs/JOB      pid and start time of the job's sampler
    nodes/NODE/gpus/N/JOB    the job was given GPU N
    nodes/NODE/epoch/JOB     GPUSHARE_EPOCH_FILE: a null device that the job's user may touch, and no more
    nodes/NODE/tokens/JOB    the job carries a token
    nodes/NODE/holds         the epilogs' holds of the last minute: begin, end (ms), helper's beat, answered or not, job
    nodes/NODE/search.lock   held while a prolog counts the samplers that look for their jobs' GPUs
    nodes/NODE/sampler.log   what the samplers had to say

By node, since several slurmd may run on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node's directory."""

    root: Path

    @classmethod
    def of(cls, state_dir: Path, node: str) -> NodeState:
        return cls(state_dir / "nodes" / node)

    def pid_file(self, job_id: int) -> Path:
        return self.root / "jobs" / str(job_id)

    def epoch_file(self, job_id: int) -> Path:
        return self.root / "epoch" / str(job_id)

    def is_wanted(self, job_id: int) -> bool:
        """Whether the job's pid file still names this process: the epilog takes it away."""
        try:
            words = self.pid_file(job_id).read_text().split()
        except OSError:
            return False
        return words[:1] == [str(os.getpid())]

    def epoch_is_over(self, job_id: int) -> bool:
        """Whether the job has touched its epoch file, whose time the prolog set to 1970."""
        try:
            return self.epoch_file(job_id).lstat().st_mtime >= 1.0
        except OSError:
            return False

    def neighbours(self, job_id: int, gpu_index: int) -> tuple[int, ...]:
        """The other jobs that were given this GPU."""
        try:
            names = os.listdir(self.root / "gpus" / str(gpu_index))
        except OSError:
            return ()
        return tuple(int(name) for name in names if name.isdecimal() and int(name) != job_id)

    def register(self, job_id: int, gpus: Collection[int]) -> None:
        """Say that the job was given these GPUs: what the prolog does where it knows them."""
        for gpu in gpus:
            path = self.root / "gpus" / str(gpu) / str(job_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def forget(self, job_id: int) -> None:
        """Remove what a job left whose epilog never came."""
        self.pid_file(job_id).unlink(missing_ok=True)
        self.epoch_file(job_id).unlink(missing_ok=True)
        for registration in self.root.glob(f"gpus/*/{job_id}"):
            registration.unlink(missing_ok=True)
