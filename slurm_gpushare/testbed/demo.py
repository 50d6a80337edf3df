"""The demonstration: jobs that share a GPU on a testbed, and what that cost them."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.daemons import last_lines
from slurm_gpushare.testbed.jobs import show, submit, wait_for
from slurm_gpushare.testbed.processes import wait_until

_WORKLOAD = f"exec {shlex.quote(sys.executable)} -m slurm_gpushare.testbed.workload"
_GPU = re.compile(r"^GPU (?P<gpu>\S+)", re.MULTILINE)
_RESULT = re.compile(r"^done .*?\btime_s=(?P<time_s>[\d.]+).*?\bisd_pct=(?P<isd_pct>-?[\d.]+)", re.MULTILINE)
_WORK_S = 8.0


@dataclass(frozen=True)
class Training:
    """A job of the demonstration: what it asks of a GPU, and where it is sent."""

    name: str
    gpu_util_pct: int
    mem_mib: int
    gres: str
    node: str


# Two light jobs share a card, a light and a heavy one another; the last has a card for itself.
JOBS = (
    Training("light-a", 35, 2000, "shard:v100_0:1", "gpu0"),
    Training("light-b", 35, 3000, "shard:v100_0:1", "gpu0"),
    Training("light-c", 35, 2000, "shard:v100_1:1", "gpu0"),
    Training("heavy-d", 90, 6000, "shard:v100_1:1", "gpu0"),
    Training("alone-e", 90, 6000, "gpu:v100_0:1", "gpu1"),
)


@dataclass(frozen=True)
class Placed:
    """Where a job runs, by its own word: the node, and the GPU that CUDA_VISIBLE_DEVICES names."""

    job_id: int
    name: str
    node: str
    gpu: str
    state: str


@dataclass(frozen=True)
class Cost:
    """What sharing did to a job, by its own clock."""

    job_id: int
    name: str
    alone_s: float
    took_s: float
    isd_pct: float


def start(testbed: Testbed) -> dict[int, Training]:
    """Submit every job; they run at the same time."""
    jobs = {}
    for job in JOBS:
        script = (
            f'echo "GPU $CUDA_VISIBLE_DEVICES"\n'
            f"{_WORKLOAD} --gpu-util {job.gpu_util_pct} --mem-mib {job.mem_mib} --work-s {_WORK_S} --epochs 4\n"
        )
        options = (f"--job-name={job.name}", f"--gres={job.gres}", f"--nodelist={job.node}")
        jobs[submit(testbed, script, *options, f"--output={_log(testbed, job)}")] = job
    return jobs


def placed(testbed: Testbed, jobs: dict[int, Training]) -> list[Placed]:
    """Where they run, once all have started."""
    wait_for(testbed, list(jobs), ["RUNNING", "COMPLETED"])
    gpus = {job: _said(testbed, job, _GPU) for job in jobs.values()}
    rows = []
    for job_id, job in jobs.items():
        facts = show(testbed, job_id)
        rows.append(Placed(job_id, job.name, facts["NodeList"], gpus[job]["gpu"], facts["JobState"]))
    return rows


def costs(testbed: Testbed, jobs: dict[int, Training]) -> list[Cost]:
    """What each took, once all have ended well."""
    wait_for(testbed, list(jobs), ["COMPLETED"], timeout_s=120)
    rows = []
    for job_id, job in jobs.items():
        result = _said(testbed, job, _RESULT)
        rows.append(Cost(job_id, job.name, _WORK_S, float(result["time_s"]), float(result["isd_pct"])))
    return rows


def _said(testbed: Testbed, job: Training, what: re.Pattern[str]) -> re.Match[str]:
    """A line of the job's output; it may come a moment after Slurm calls the job running."""
    found: list[re.Match[str]] = []

    def look() -> bool:
        log = _log(testbed, job)
        if log.exists() and (match := what.search(log.read_text())):
            found.append(match)
        return bool(found)

    if not wait_until(look, 30):
        raise GpushareError(f"demo: {job.name} does not say '{what.pattern}': {last_lines(_log(testbed, job))}")
    return found[0]


def _log(testbed: Testbed, job: Training) -> Path:
    return testbed.layout.home / f"{job.name}.out"
