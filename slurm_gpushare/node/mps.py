"""NVIDIA's Multi-Process Service on this node: who serves a card, and how its control daemon is spoken to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

CONTROL = "nvidia-cuda-mps-control"
_SERVER = "nvidia-cuda-mps-server"
_CONTROL_LIMIT_S = 3.0


def mps_server_uid(pid: int) -> int | None:
    """Whose MPS server a process is; None if it is none."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return os.stat(f"/proc/{pid}").st_uid if name.rpartition(b"/")[2] == _SERVER.encode() else None
    except OSError:
        return None


def control_daemons() -> list[int]:
    """The control daemons on this machine."""
    named = (process.pid for process in psutil.process_iter(["name"]) if process.info["name"][:15] == CONTROL[:15])
    return [pid for pid in named if mps_server_uid(pid) is None]


class MpsError(Exception):
    """A control daemon that is not there, does not answer, or refuses."""


def control(pipe_dir: Path, command: str, limit_s: float = _CONTROL_LIMIT_S) -> list[str]:
    """The lines that the control daemon of `pipe_dir` answers to a command; MpsError where it does not."""
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe_dir), "PATH": os.environ.get("PATH", os.defpath)}
    return answer_of([CONTROL], environ, command, limit_s)


def in_fault(pipe_dir: Path) -> bool:
    """Whether the server of a card is in FAULT, and takes nobody any more; MpsError where nobody answers."""
    servers = control(pipe_dir, "get_server_list")
    return any("FAULT" in line for pid in servers for line in control(pipe_dir, f"get_server_status {pid.strip()}"))


def end_clients(pipe_dir: Path, owns: Callable[[int], bool | None]) -> int:
    """Have the server end the work of the clients that are `owns`: they can be killed then, and take nobody along.

    How many there were; MpsError where the daemon does not answer.
    """
    ended = 0
    for server in control(pipe_dir, "get_server_list"):
        for client in filter(str.isdecimal, control(pipe_dir, f"get_client_list {server.strip()}")):
            if owns(int(client)):
                control(pipe_dir, f"terminate_client {server.strip()} {client}")
                ended += 1
    return ended


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
