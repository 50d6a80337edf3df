"""How much waiting sharing has spared: the very jobs of a period once more, as a plain Slurm would have run them.

Each job gets whole cards in the order in which it could have started, for as long as it would have run alone. What is
not known (how long a card takes to change hands, how long exactly a job runs alone) is varied, so that the answer is an
interval. Forecasts made while jobs were placed play no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.whatif.assess import Band, cards_of
from slurm_gpushare.whatif.jobs import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.simulate import Fifo, run

MOST_JOBS = 5000
"""Of a period with more nothing is told: each is simulated several times."""
LEAST_MEAN_S = 60.0
"""Of shorter jobs, on average, how long cards take to change hands decides, and nobody can tell."""
HANDOVERS_S = (0.2, 2.0)
"""From one job's end to the moment at which the next has its card."""
ALONE_ERROR = 0.01
"""Relative, of how long jobs run alone on average."""


@dataclass(frozen=True, slots=True)
class WaitedJob:
    """A job of the period."""

    eligible_s: float
    start_s: float
    """When it really started."""
    alone_s: float
    """How long it runs on cards of its own."""
    gpus: int


def waited_job(row: AccountedJob, isd_pct: float) -> WaitedJob | None:
    """A job of accounting that sharing slowed by so much; None if it has not started."""
    if row.start_s is None:
        return None
    return WaitedJob(
        max(row.submit_s, row.eligible_s or 0), row.start_s, row.elapsed_s / (1 + isd_pct / 100), cards_of(row)
    )


def waiting_avoided_h(jobs: Sequence[WaitedJob], gpus: int, from_s: float, until_s: float) -> Band | None:
    """Job hours of waiting within a period that there would have been on a plain Slurm, less those that there were.

    None where nobody could tell: no job, more than can be simulated, or jobs of seconds. Jobs that began before the
    period came first, when they really did; a job that waits across one of its ends counts for its part.
    """
    ordered = sorted((job for job in jobs if 0 < job.gpus <= gpus), key=lambda job: job.eligible_s)
    if not 0 < len(ordered) <= MOST_JOBS or np.mean([job.alone_s for job in ordered]) < LEAST_MEAN_S:
        return None
    ready_s = np.array([job.start_s if job.start_s < from_s else max(job.eligible_s, from_s) for job in ordered])
    order = np.argsort(ready_s, kind="stable")
    ready_s, ordered = ready_s[order], [ordered[i] for i in order.tolist()]
    real_s = _waited_s(ready_s, np.array([job.start_s for job in ordered]), from_s, until_s)
    found = []
    for handover_s, factor in ((HANDOVERS_S[0], 1.0 - ALONE_ERROR), (HANDOVERS_S[1], 1.0 + ALONE_ERROR)):
        took_s = np.array([max(job.alone_s, 1.0) * factor + handover_s for job in ordered])
        work = SimulatedJobs(
            gpus, ready_s - ready_s[0], took_s, np.array([job.gpus for job in ordered], np.int64),
            np.zeros(len(ordered), np.int64), MeasuredPairs(("",), np.full((1, 1), np.nan)), 0,
        )  # fmt: skip
        world = run(work, Fifo(work))
        start_s = ready_s[0] + world.end_s - took_s
        found.append((_waited_s(ready_s, start_s, from_s, until_s) - real_s) / 3600.0)
    return Band.of(found)


def _waited_s(ready_s: np.ndarray, start_s: np.ndarray, from_s: float, until_s: float) -> float:
    return float(np.sum(np.maximum(np.minimum(start_s, until_s) - np.maximum(ready_s, from_s), 0.0)))
