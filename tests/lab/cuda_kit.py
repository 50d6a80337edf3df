"""A node of two emulated cards with stand-ins of libcuda, NVML and the MPS control program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from emulated import NODE, EmulatedNode
from gpushare_lab.emulator.node import create_node


class Node:
    """A node of two emulated cards on which the command runs."""

    def __init__(self, directory: Path, stand_ins: Path) -> None:
        self.emu, self.calls = directory / "emu", directory / "calls"
        create_node(self.emu, NODE, 2)
        self.environ = EmulatedNode(self.emu, stand_ins, None).env(  # type: ignore[arg-type]
            GPUSHARE_EMU_CUDA_LOG=str(self.calls), PATH=f"{stand_ins / 'bin'}:{os.environ['PATH']}"
        )

    def check(self, *words: str, seconds: str = "0.2", **environ: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "slurm_gpushare", "card-check", "--gpu", "1", "--seconds", seconds, *words]
        return subprocess.run(argv, env={**self.environ, **environ}, capture_output=True, text=True, timeout=300)

    def python(self, code: str, *words: str, **environ: str) -> str:
        """What a program with the stand-ins prints."""
        argv = [sys.executable, "-c", code, *words]
        done = subprocess.run(argv, env={**self.environ, **environ}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self, *words: str, seconds: str = "0.2", **environ: str) -> dict[str, dict[str, Any]]:
        document = json.loads(self.check("--json", *words, seconds=seconds, **environ).stdout)
        return {row["try"]: row for row in document["rows"]}
