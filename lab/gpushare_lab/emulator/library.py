"""Building the emulated libnvidia-ml.so.1 with gcc."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import replacing

NAME = "libnvidia-ml.so.1"
SOURCES = [Path(__file__).with_name(name) for name in ("card.c", "nvml.c", "sensors.c")]
FLAGS = ["-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{NAME}"]
CUDA = "libcuda.so.1"
CUDA_SOURCES = [Path(__file__).with_name(name) for name in ("card.c", "cuda.c")]
_ALWAYS = ["-std=gnu11", "-O2", "-Wall", "-Wextra"]


def build_library(target_dir: Path) -> Path:
    """Compile the library into `target_dir` and return its path; an existing one is replaced whole.

    Put `target_dir` in LD_LIBRARY_PATH and the real pynvml loads it. It is safe to call while processes use the
    library already: they keep the old file.
    """
    return compile_c(target_dir / NAME, [*FLAGS, *map(str, SOURCES)])


def build_cuda(target_dir: Path) -> Path:
    """Compile libcuda's stand-in, which card-check needs, beside the emulated NVML."""
    options = ["-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{CUDA}"]
    return compile_c(target_dir / CUDA, [*options, *map(str, CUDA_SOURCES)])


def compile_c(target: Path, arguments: Sequence[str]) -> Path:
    """Compile and link with gcc; an existing file is replaced whole."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise GpushareError("the emulated GPUs need gcc, which is not installed", "Run 'apt-get install gcc libc6-dev'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, 0o755) as draft:
            command = [compiler, *_ALWAYS, "-o", str(draft), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.returncode != 0:
                said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
                why = next((line for line in said if "error" in line), said[0])
                raise GpushareError(f"cannot build {target}: {why}", "Check that gcc and libc6-dev are complete")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpushareError(f"cannot build {target}: {error}") from error
    return target
