"""Helpers of the emulated GPU's tests: a node in a temporary directory, and processes that use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpushare_lab.emulator.card import EmulatedCard
from gpushare_lab.emulator.node import card_path

NODE = "gpu0"


_ASKER = """
import json, os, sys
import pynvml as n
for line in sys.stdin:
    expression, environment = json.loads(line)
    os.environ.clear()
    os.environ.update(environment)
    try:
        n.nvmlInit()
        try:
            card = n.nvmlDeviceGetHandleByIndex(0)
            answer = " ".join(map(str, eval(f"[{expression}]")))
        finally:
            n.nvmlShutdown()
    except n.NVMLError as error:
        answer = f"NVMLError {error.value}"
    print(answer, flush=True)
"""


class Asker:
    """A process with the real pynvml and the emulated library, which answers for every test: importing it is slow."""

    def __init__(self, lib_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ASKER], env={**os.environ, "LD_LIBRARY_PATH": str(lib_dir)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, expression: str, environment: dict[str, str]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([expression, environment]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the asker died of {expression}"
        return answer.strip()

    def close(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class EmulatedNode:
    """A node of emulated GPUs and the library that shows them."""

    emu_dir: Path
    lib_dir: Path
    asker: Asker

    def env(self, **more: str) -> dict[str, str]:
        slurm_free = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CUDA"))}
        own = {"GPUSHARE_EMU_DIR": str(self.emu_dir), "GPUSHARE_EMU_NODE": NODE, "LD_LIBRARY_PATH": str(self.lib_dir)}
        return {**slurm_free, **own, **more}

    def card(self, gpu: int = 0) -> EmulatedCard:
        return EmulatedCard(card_path(self.emu_dir, NODE, gpu))

    def python(self, code: str, **more_env: str) -> subprocess.Popen[str]:
        """Start a Python of its own, since a process loads one libnvidia-ml.so.1 in its life."""
        return subprocess.Popen(
            [sys.executable, "-c", code], env=self.env(**more_env), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def nvml(self, expression: str, **more_env: str) -> str:
        """What an expression over `n` (pynvml) and `card` (its first device) gives; an NVMLError by its number."""
        return self.asker.ask(expression, self.env(**more_env))

    def job(self, *arguments: str, **more_env: str) -> subprocess.Popen[str]:
        """Start an emulated training job."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpushare_lab.job.workload", *arguments],
            env=self.env(**more_env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run_job(self, *arguments: str, **more_env: str) -> tuple[int, str, str]:
        """Exit code, output and error output of a job that has ended."""
        job = self.job(*arguments, **more_env)
        out, err = job.communicate(timeout=60)
        return job.returncode, out, err


def figures(line: str) -> dict[str, float]:
    """The name=number words of a job's line."""
    return {name: float(value) for name, _, value in (word.partition("=") for word in line.split()) if value}
