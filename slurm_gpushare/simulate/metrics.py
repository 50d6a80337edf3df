"""What a run is judged by; the names are those of the JSON output."""

from __future__ import annotations

import numpy as np

from slurm_gpushare.simulate.workload import Floats
from slurm_gpushare.simulate.world import World


def metrics(world: World) -> dict[str, float]:
    """The figures of a finished run. ISD is over all jobs; residents are those that had a guest."""
    work = world.work
    jct_s = world.end_s - work.submit_s
    wait_s = jct_s - world.ran_s  # for a preempted job, all the time it did not run
    isd_pct = np.maximum((world.ran_s / work.duration_s - 1) * 100, 0.0)
    solo_s = float(np.sum(work.duration_s * work.num_gpus))
    return {
        "avg_jct_s": float(jct_s.mean()),
        "p50_jct_s": _percentile(jct_s, 50),
        "p99_jct_s": _percentile(jct_s, 99),
        "avg_wait_s": float(wait_s.mean()),
        "max_wait_s": float(wait_s.max()),
        "makespan_s": float(world.end_s.max()),
        "ps_pct": (1 - world.busy_s / solo_s) * 100,
        "isd_mean_pct": float(isd_pct.mean()),
        "isd_p95_pct": _percentile(isd_pct, 95),
        "isd_max_pct": float(isd_pct.max()),
        "resident_isd_p99_pct": _percentile(isd_pct[world.shared & ~world.guest], 99),
        "guest_isd_p99_pct": _percentile(isd_pct[world.guest], 99),
        "shared_fraction": float(world.shared.mean()),
        "busy_gpu_hours": world.busy_s / 3600,
    }


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
