"""What a run is judged by, simulated or real; the names are those of the JSON output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_gpushare.knowledge.rates import Bools, Floats, Ints
from slurm_gpushare.whatif.world import World


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Every job of a run, by index, and the time in which cards had a job."""

    submit_s: Floats
    end_s: Floats
    ran_s: Floats
    duration_s: Floats
    """Alone on a card."""
    num_gpus: Ints
    shared: Bools
    guest: Bools
    """Started on a card that had a job."""
    busy_s: float
    gpus: int = 0
    """How many cards there were; 0: not known, and so is the energy."""


IDLE_W, WORK_W = 42.0, 116.0
"""Of a V100: idle, and what a job that keeps half of it busy adds."""


def metrics(world: World) -> dict[str, float]:
    """The figures of a finished simulation."""
    work = world.work
    return figures(
        FinishedRun(
            work.submit_s, world.end_s, world.ran_s, work.duration_s, work.num_gpus, world.shared, world.guest,
            world.busy_s, work.gpus,
        )
    )  # fmt: skip


def figures(run: FinishedRun) -> dict[str, float]:
    """The figures of a finished run. ISD is over all jobs; residents are those that had a guest."""
    jct_s = run.end_s - run.submit_s
    wait_s = jct_s - run.ran_s  # for a preempted job, all the time it did not run
    isd_pct = np.maximum((run.ran_s / run.duration_s - 1) * 100, 0.0)
    solo_s = float(np.sum(run.duration_s * run.num_gpus))
    return {
        "avg_jct_s": float(jct_s.mean()),
        "p50_jct_s": percentile(jct_s, 50),
        "p99_jct_s": percentile(jct_s, 99),
        "avg_wait_s": float(wait_s.mean()),
        "max_wait_s": float(wait_s.max()),
        "single_p99_wait_s": percentile(wait_s[run.num_gpus == 1], 99),
        "makespan_s": float(run.end_s.max()),
        "ps_pct": (1 - run.busy_s / solo_s) * 100,
        "isd_mean_pct": float(isd_pct.mean()),
        "isd_p95_pct": percentile(isd_pct, 95),
        "isd_max_pct": float(isd_pct.max()),
        "resident_isd_p99_pct": percentile(isd_pct[run.shared & ~run.guest], 99),
        "guest_isd_p99_pct": percentile(isd_pct[run.guest], 99),
        "shared_fraction": float(run.shared.mean()),
        "busy_gpu_hours": run.busy_s / 3600,
        # The work is the same under every policy: what differs is how long the cards stand there.
        "energy_kwh": (IDLE_W * run.gpus * float(run.end_s.max() - run.submit_s.min()) + WORK_W * solo_s) / 3.6e6,
    }


def percentile(values: Floats, percent: float) -> float:
    """By nearest rank, as in reports: a value that occurred."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else 0.0
