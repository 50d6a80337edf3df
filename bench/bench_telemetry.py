"""What telemetry costs a node: the sampler's CPU and memory, the time of prolog and epilog."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from gpushare_lab.emulator.library import build_library
from gpushare_lab.emulator.node import create_node

from slurm_gpushare.protocol.files import resource_dir

SECONDS = float(os.environ.get("GPUSHARE_BENCH_SECONDS", "60"))
CPU_LIMIT_PCT, MEMORY_LIMIT_MIB, SCRIPT_LIMIT_S = 1.0, 60.0, 0.3
LISTED = 12  # processes of the job: a trainer and its data loaders
RUNS = 40


def environment(base: Path) -> dict[str, str]:
    """One node with one emulated card, default sampling, and stand-ins for munged and slurmd, which are not ours."""
    build_library(base / "lib")
    create_node(base / "emu", "gpu0", 1)
    conf = f"Partitions=gpu\nStateDir={base}/state\nSpoolDir={base}/spool\nDcgmJobMappingDir={base}/dcgm\n"
    (base / "gpushare.conf").write_text(conf)
    (base / "bin").mkdir()
    for name, text in (
        ("munge", "cat"),
        ("scontrol", f'while read -r pid; do echo "$pid $2 0 0 0"; done <{base}/pids'),
    ):
        (base / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (base / "bin" / name).chmod(0o755)
    (base / "pids").touch()
    return {
        **os.environ,
        "GPUSHARE_CONF": str(base / "gpushare.conf"),
        "GPUSHARE_EMU_DIR": str(base / "emu"),
        "GPUSHARE_PYTHON": sys.executable,
        "LD_LIBRARY_PATH": str(base / "lib"),
        "PATH": f"{base}/bin:{os.environ['PATH']}",
        "SLURMD_NODENAME": "gpu0",
        "SLURM_JOB_GPUS": "0",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_UID": str(os.getuid()),
    }


def script_times(env: dict[str, str]) -> dict[str, list[float]]:
    """Wall-clock seconds of each prolog and epilog."""
    times: dict[str, list[float]] = {"prolog": [], "epilog": []}
    for number in range(RUNS):
        for name, took in times.items():
            started = time.perf_counter()
            subprocess.run([resource_dir("prolog") / f"{name}.sh"], env={**env, "SLURM_JOB_ID": str(1 + number)})
            took.append(time.perf_counter() - started)
            time.sleep(0.2)  # the sampler that was just started or ended is not what is measured
    return times


def sampler_cost(env: dict[str, str], base: Path) -> dict[str, float]:
    """CPU (children included) and memory of one sampler at its default rate, in the most expensive phase."""
    workload = [sys.executable, "-m", "gpushare_lab.job.workload", "--work-s", "3600", "--gpu-util", "60"]
    jobs = [subprocess.Popen(workload, env=env, stdout=subprocess.DEVNULL)]
    jobs += [subprocess.Popen(["sleep", "3600"]) for _ in range(LISTED - 1)]
    (base / "pids").write_text("".join(f"{job.pid}\n" for job in jobs))
    env = {**env, "SLURM_JOB_ID": "77"}
    try:
        subprocess.run([resource_dir("prolog") / "prolog.sh"], env=env)
        pid = int((base / "state/nodes/gpu0/jobs/77").read_text().split()[0])
        sampler = psutil.Process(pid)
        time.sleep(5)  # the start is paid once a job and reported by itself
        start_s = sum(sampler.cpu_times()[:4])
        time.sleep(SECONDS)
        used_s = sum(sampler.cpu_times()[:4]) - start_s
        memory = sampler.memory_full_info()
        subprocess.run([resource_dir("prolog") / "epilog.sh"], env=env)
        sampler.wait(20)
    finally:
        for job in jobs:
            job.send_signal(signal.SIGKILL)
            job.wait()
    return {
        "cpu_pct": 100 * used_s / SECONDS,
        "start_cpu_s": start_s,
        "rss_mib": memory.rss / 2**20,
        "unique_mib": memory.uss / 2**20,
    }


def main(out: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="gs-bench-"))
    try:
        env = environment(base)
        cost = sampler_cost(env, base)
        times = script_times(env)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    rows = [
        ("sampler CPU, % of a core", cost["cpu_pct"], CPU_LIMIT_PCT),
        ("sampler resident memory, MiB", cost["rss_mib"], MEMORY_LIMIT_MIB),
        *(
            (f"{name} {what}, s", value, SCRIPT_LIMIT_S)
            for name, took in times.items()
            for what, value in (("median", statistics.median(took)), ("slowest", max(took)))
        ),
    ]
    for label, value, limit in rows:
        print(f"{label:32} {value:8.3f}   limit {limit:g}   {'ok' if value < limit else 'OVER'}")
    print(
        f"{'sampler start, CPU s once':32} {cost['start_cpu_s']:8.3f}   (its own memory: {cost['unique_mib']:.1f} MiB)"
    )
    (out / "telemetry.json").write_text(
        json.dumps({label: {"value": value, "limit": limit} for label, value, limit in rows}, indent=2) + "\n"
    )
