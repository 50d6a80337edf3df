"""What the emulation costs: 32 emulated jobs in shares of a core, and one NVML call in microseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from slurm_gpushare.testbed.emulator import build_library, create_node

JOBS, GPUS, SECONDS = 32, 16, 15.0
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


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gs-bench-") as scratch:
        emu = Path(scratch) / "emu"
        create_node(emu, NODE, GPUS)
        library = build_library(Path(scratch) / "lib")
        env = {**os.environ, "GPUSHARE_EMU_DIR": str(emu), "GPUSHARE_EMU_NODE": NODE}
        env.pop("SLURMD_NODENAME", None)
        command = [sys.executable, "-m", "slurm_gpushare.testbed.workload", "--work-s", "600", "--epochs", "100"]
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
    utilisation_us, processes_us, samples_us = map(float, calls.stdout.split())
    result = {
        "jobs": JOBS,
        "cores_used": round(used_s / passed_s, 3),
        "limit_cores": 0.5,
        "mib_a_job": round(memory, 1),
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
