"""Waiting that sharing has spared, worked out afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.assess import Band, shipped_pairs
from slurm_gpushare.whatif.our_policy import Gpushare, Options
from slurm_gpushare.whatif.shadow import MOST_JOBS, WaitedJob, waiting_avoided_h
from slurm_gpushare.whatif.simulate import Fifo, run
from slurm_gpushare.whatif.traces import SimulatedJobs


def test_of_four_jobs_on_one_card_two_at_a_time_a_plain_slurm_has_six_waits_of_a_job() -> None:
    """Alone they would start after 0, 1, 2 and 3 hours; two at a time after 0, 0, 1.2 and 1.2."""
    jobs = [WaitedJob(0.0, start_h * 3600.0, 3600.0, 1) for start_h in (0.0, 0.0, 1.2, 1.2)]
    band = waiting_avoided_h(jobs, 1, 0.0, 6 * 3600.0)
    assert band is not None
    assert band.low < 6.0 - 2.4 < band.high
    assert band.high - band.low < 0.5


def test_where_cards_suffice_nothing_was_spared() -> None:
    jobs = [WaitedJob(60.0 * n, 60.0 * n, 600.0, 1) for n in range(4)]
    band = waiting_avoided_h(jobs, 4, 0.0, 3600.0)
    assert band is not None
    assert (band.low, band.high) == (0.0, 0.0)


def test_only_waiting_within_the_period_counts() -> None:
    before = WaitedJob(-7200.0, -3600.0, 5400.0, 1)  # has its card until 1800
    beside = WaitedJob(-7200.0, 0.0, 1800.0, 1)
    band = waiting_avoided_h([before, beside], 1, 0.0, 900.0)
    assert band is not None
    assert 0.24 < band.low <= band.high <= 0.25, "it would have waited through all of the period"


def test_sharing_that_made_jobs_wait_longer_is_told_as_that() -> None:
    band = waiting_avoided_h([WaitedJob(0.0, 1800.0, 600.0, 1)], 2, 0.0, 3600.0)
    assert band is not None
    assert band.high < 0.0


def test_of_too_many_jobs_nothing_is_told() -> None:
    assert waiting_avoided_h([WaitedJob(0.0, 0.0, 1.0, 1)] * (MOST_JOBS + 1), 4, 0.0, 10.0) is None
    assert waiting_avoided_h([], 4, 0.0, 10.0) is None


def twins(seed: int, jobs: int = 120, gpus: int = 8) -> tuple[float, Band]:
    """What sharing spared a queue in one simulation against another without it, and what is worked out of the first.

    The two differ in how long each job takes; how fast a card changes hands and what a job lost is known roughly.
    """
    draw, pairs = np.random.default_rng(seed), shipped_pairs()
    alone_s = np.clip(draw.lognormal(np.log(1800.0), 1.0, jobs), 60.0, 21_600.0)
    submit_s = np.cumsum(draw.exponential(alone_s.mean() / (1.2 * gpus), jobs))
    handover_s, kinds = draw.uniform(0.3, 1.8), draw.integers(len(pairs.profiles), size=jobs)
    one = np.ones(jobs, np.int64)

    def work() -> SimulatedJobs:
        took_s = alone_s * (1.0 + 0.02 * draw.standard_normal(jobs)) + handover_s
        return SimulatedJobs(gpus, submit_s, took_s, one, kinds, pairs, seed)

    ours, plain = work(), work()
    shared = run(ours, Gpushare(ours, seed, Options("learned", "limit", "priority", PolicySettings())))
    alone = run(plain, Fifo(plain))
    waits_h = [float(np.sum(world.end_s - submit_s - world.ran_s)) / 3600 for world in (alone, shared)]
    isd_pct = 100.0 * (shared.ran_s / ours.duration_s - 1.0) + 2.0 * draw.standard_normal(jobs) * shared.shared
    ran_s = (shared.ran_s - handover_s) / (1.0 + np.maximum(isd_pct, 0.0) / 100.0)
    rows = zip(submit_s.tolist(), (shared.end_s - shared.ran_s).tolist(), ran_s.tolist(), strict=True)
    band = waiting_avoided_h([WaitedJob(*row, 1) for row in rows], gpus, 0.0, float(shared.end_s.max()) + 1.0)
    assert band is not None
    return waits_h[0] - waits_h[1], band


@pytest.mark.slow
def test_the_interval_holds_the_truth_in_nine_of_ten_twin_runs() -> None:
    found = [twins(seed) for seed in range(10)]
    assert sum(band.low <= true <= band.high for true, band in found) >= 9, found
    assert all(band.high - band.low < 60.0 for _, band in found), "an interval that holds everything says nothing"
