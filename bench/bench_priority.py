"""Whether anybody who does not share waits longer: the same queues on plain Slurm and with us, in pairs.

Every fifth job has no token and ranks before all others; every other one of these wants two GPUs. Needs root and the
data. ``GPUSHARE_QUEUES=20x100 python -m bench priority`` runs 20 pairs of queues of 100 jobs: some hours.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from gpushare_lab.experiment.replay_jobs import ReplayJobs, replay_jobs
from gpushare_lab.experiment.replay_run import Replay
from gpushare_lab.peers.trace_jobs import read_any_trace, read_rates
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed

from bench.bench_simulate import data_dir

QUEUES = "1x60"
GPUS, LOAD, MEAN_S, SUITE = 8, 1.2, 12.0, "trixie"
EVERY = 5
"""So many jobs to one that shares with nobody."""


def queue(jobs: int, seed: int) -> tuple[ReplayJobs, frozenset[int]]:
    """The jobs, and those without a token."""
    data = data_dir()
    assert data is not None
    trace, rates = read_any_trace(data / "trace_philly_first_half.csv"), read_rates(data / "v100_pairs.csv")
    found = replay_jobs(trace, rates, gpus=GPUS, jobs=jobs, load=LOAD, seed=seed, mean_s=MEAN_S, node_gpus=0)
    alone = range(EVERY, jobs, EVERY)
    wide = np.array(found.work.num_gpus)
    wide[list(alone)[::2]] = 2
    return replace(found, work=replace(found.work, num_gpus=wide)), frozenset(alone)


def waits(testbed: Testbed, jobs: ReplayJobs, alone: frozenset[int], policy: str) -> dict[int, float]:
    """How long each of the jobs without a token waited."""
    run = Replay(testbed, jobs, "learned", lambda progress: None, alone=alone).run(policy)
    return {stay.job: stay.joined_s - stay.submit_s for stay in run.stays if stay.job in alone}


def main(out: Path) -> None:
    if data_dir() is None:
        print("no measured data: set GPUSHARE_DATA")
        return
    pairs, jobs = map(int, os.environ.get("GPUSHARE_QUEUES", QUEUES).split("x"))
    later: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        testbed = Testbed(Path(top, "bed")).up(Shape(nodes=2, gpus=4, shards=2), suite=SUITE)
        try:
            for seed in range(pairs):
                work, alone = queue(jobs, seed)
                plain, ours = (waits(testbed, work, alone, policy) for policy in ("exclusive", "gpushare"))
                here = [ours[job] - plain[job] for job in sorted(plain.keys() & ours.keys())]
                later += here
                print(f"queue {seed}: {len(here)} jobs that do not share start {_figures(here)}", flush=True)
        finally:
            testbed.down(purge=True)
    print(f"{pairs} queues of {jobs} jobs: {_figures(later)}")
    (out / "priority.json").write_text(json.dumps({"queues": pairs, "jobs": jobs, "later_s": later}, indent=1) + "\n")


def _figures(later_s: list[float]) -> str:
    p95 = float(np.percentile(later_s, 95))
    return (
        f"{statistics.median(later_s):+.1f} s later in the median, {p95:+.1f} s at p95, {max(later_s):+.1f} s at most"
    )
