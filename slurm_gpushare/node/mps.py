"""NVIDIA's Multi-Process Service on this node: who serves a card, and how its control daemon is spoken to."""

from __future__ import annotations

import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_CONTROL_LIMIT_S = 10.0


class MpsError(Exception):
    """A control daemon that is not there, does not answer, or refuses."""


def control(pipe_dir: Path, command: str, limit_s: float = _CONTROL_LIMIT_S) -> list[str]:
    """The lines that the control daemon of `pipe_dir` answers to a command; MpsError where it does not."""
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe_dir), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return answer_of([CONTROL], environ, command, limit_s)


def answer_of(argv: list[str], environ: dict[str, str], command: str, limit_s: float) -> list[str]:
    """What the program prints when it is given `command`."""
    try:
        done = subprocess.run(
            argv, env=environ, input=f"{command}\n", capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MpsError(f"{CONTROL}: {type(error).__name__}") from error
    if done.returncode:
        raise MpsError(f"{CONTROL}: {(done.stderr or done.stdout).strip()[:200] or done.returncode}")
    return done.stdout.splitlines()
