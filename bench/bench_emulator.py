"""What the emulation costs (32 jobs in shares of a core, NVML calls in microseconds) and how well it keeps time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from gpushare_lab.emulator import build_library, create_node

JOBS, GPUS, SECONDS, LONE_S = 32, 16, 15.0, 10.0
NODE = "gpu0"
CALLS = """
import pynvml, time
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
def cost(call, *more):
    begin = time.perf_counter()
    for _ in range(2000):
        call(card, *more)
    return round((time.perf_counter() - begin) / 2000 * 1e6, 1)
print(cost(pynvml.nvmlDeviceGetUtilizationRates), cost(pynvml.nvmlDeviceGetComputeRunningProcesses),
      cost(pynvml.nvmlDeviceGetProcessUtilization, 0))
"""


def _lone_job_s(workload: list[str], env: dict[str, str]) -> float:
    """How long a job of LONE_S takes by our clock, from its first line to its last."""
    job = subprocess.Popen([*workload, "--work-s", str(LONE_S)], env=env, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    job.stdout.readline()
    begin = time.monotonic()
    job.stdout.read()
    end = time.monotonic()
    job.wait()
    return end - begin


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gs-bench-") as scratch:
        emu = Path(scratch) / "emu"
        create_node(emu, NODE, GPUS)
        library = build_library(Path(scratch) / "lib")
        env = {**os.environ, "GPUSHARE_EMU_DIR": str(emu), "GPUSHARE_EMU_NODE": NODE}
        env.pop("SLURMD_NODENAME", None)
        command = [sys.executable, "-m", "gpushare_lab.job.workload", "--work-s", "600", "--epochs", "100"]
        jobs = [
            psutil.Popen(
                command, env={**env, "CUDA_VISIBLE_DEVICES": str(index % GPUS)}, stdout=subprocess.PIPE, text=True
            )
            for index in range(JOBS)
        ]
        try:
            for job in jobs:
                assert job.stdout.readline().startswith("training")
            before = {job.pid: job.cpu_times() for job in jobs}
            begin = time.monotonic()
            time.sleep(SECONDS)
            passed_s = time.monotonic() - begin
            after = {job.pid: job.cpu_times() for job in jobs}
            used_s = sum(after[pid].user + after[pid].system - before[pid].user - before[pid].system for pid in before)
            memory = sum(job.memory_full_info().uss for job in jobs) / JOBS / 2**20
            calls = subprocess.run(
                [sys.executable, "-c", CALLS],
                env={**env, "LD_LIBRARY_PATH": str(library.parent)},
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            for job in jobs:
                job.terminate()
            for job in jobs:
                job.wait()
        lone_s = _lone_job_s(command[:3], env)
    utilisation_us, processes_us, samples_us = map(float, calls.stdout.split())
    result = {
        "jobs": JOBS,
        "cores_used": round(used_s / passed_s, 3),
        "limit_cores": 0.5,
        "mib_a_job": round(memory, 1),
        "lone_job_error_pct": round(100 * (lone_s / LONE_S - 1), 2),
        "nvml_utilization_us": utilisation_us,
        "nvml_processes_us": processes_us,
        "nvml_process_samples_us": samples_us,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "emulator.json").write_text(json.dumps(result, indent=1))
    for name, value in result.items():
        print(f"{name:26} {value}")


if __name__ == "__main__":
    main(Path("out/bench"))
