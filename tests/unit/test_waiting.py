"""Waiting that sharing has spared, worked out afterwards."""

from __future__ import annotations

from slurm_gpushare.whatif.waiting import MOST_JOBS, WaitedJob, waiting_avoided_h


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
