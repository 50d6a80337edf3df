"""How long jobs run: history, limits and what is done, as a distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_gpushare.helper.durations import UNKNOWN_SITE, Ahead, UsualScatter, expect, given_done, usual_scatter
from slurm_gpushare.helper.queue_facts import facts_by_token
from slurm_gpushare.store.workloads import LOG_DURATION, Profile
from slurm_gpushare.whatif.known_durations import Durations
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs


def ends(middle_s: float, spread: float, limit_s: float, done_s: float) -> tuple[float, float, float]:
    low, middle, high = given_done(*(np.array([value]) for value in (middle_s, spread, limit_s, done_s)))
    return float(low[0]), float(middle[0]), float(high[0])


def test_one_short_run_says_little_against_a_long_limit() -> None:
    """A first run of 20 s is often a test of the script: the limit of an hour counts too, and nobody is sure."""
    one, many = expect(20.0, None, 1, 3600.0), expect(20.0, 0.05, 9, 3600.0)
    assert one.middle_s > 300.0
    assert many.middle_s < 40.0
    assert ends(*many, 3600.0, 0.0)[2] < 60.0, "nine runs that agree say more than a generous limit"
    assert ends(*one, 3600.0, 0.0)[2] > 1500.0


def test_runs_that_agree_with_each_other_and_with_the_limit_say_much() -> None:
    wild, steady = expect(400.0, 2.0, 9, 900.0), expect(400.0, 0.05, 9, 900.0)
    assert steady.spread < 0.25 < wild.spread
    assert steady.middle_s == pytest.approx(405.0, abs=10.0)


def test_beside_a_limit_runs_that_differ_wildly_say_next_to_nothing() -> None:
    wild, limit = expect(60.0, 2.3, 9, 36_000.0), expect(None, None, 0, 36_000.0)
    assert wild.middle_s == pytest.approx(limit.middle_s, rel=0.06)
    assert wild.spread == pytest.approx(limit.spread, rel=0.1)
    assert expect(60.0, 2.3, 9, math.inf).spread > 2.0, "without a limit they are all there is"


def site(scatter: float, tokens: int = 26, runs: int = 9) -> UsualScatter:
    return usual_scatter(np.full(tokens, scatter), np.full(tokens, runs))


def test_runs_that_agree_say_little_where_runs_of_other_tokens_differ() -> None:
    """Jobs that were submitted together are alike, and the token's next job is not."""
    limit = expect(None, None, 0, 360_000.0)
    trusted, doubted = (expect(300.0, 0.1, 9, 360_000.0, usual) for usual in (UNKNOWN_SITE, site(1.7)))
    assert trusted.middle_s < 1000.0
    assert doubted.middle_s == pytest.approx(limit.middle_s, rel=0.25)
    assert doubted.spread < 1.5 * limit.spread, "that the two contradict each other is no surprise there"


def test_one_run_says_no_more_where_all_tokens_agree() -> None:
    """A first run may be a test of the script there too."""
    assert site(0.05) == UNKNOWN_SITE
    assert site(1.7, runs=1) == UNKNOWN_SITE, "single runs do not say how far runs differ"


def test_the_more_tokens_differ_the_more_that_counts() -> None:
    weights = [site(1.7, tokens).weight for tokens in (1, 10, 26)]
    assert weights == sorted(set(weights))


def profile(token: str, scatter: float) -> Profile:
    return Profile(token, "V100", 1000, 1, 9, 2000, 16_384, 300.0, {}, {LOG_DURATION: scatter}, 0, 0)


def test_the_helper_doubts_a_history_by_what_it_sees_of_other_tokens() -> None:
    wild = {f"gs-{i}": profile(f"gs-{i}", 1.7) for i in range(25)}
    facts = facts_by_token({**wild, "gs-steady": profile("gs-steady", 0.1)})
    assert facts["gs-steady"].usual_scatter.scatter > 1.0
    assert facts_by_token({"gs-steady": profile("gs-steady", 0.1)})["gs-steady"].usual_scatter == UNKNOWN_SITE


def test_without_history_half_of_the_limit_is_expected_and_without_both_nothing() -> None:
    assert expect(None, None, 0, 1800.0).middle_s == pytest.approx(900.0)
    assert expect(None, None, 0, math.inf).middle_s == math.inf
    assert ends(math.inf, 0.5, math.inf, 70.0) == (70.0, math.inf, math.inf)


@pytest.mark.parametrize("done_s", [0.0, 100.0, 900.0, 1700.0])
def test_ends_are_in_order_after_what_is_done_and_within_the_limit(done_s: float) -> None:
    low, middle, high = ends(900.0, 0.5, 1800.0, done_s)
    assert done_s <= low < middle < high <= 1800.0


def test_who_outlives_its_history_is_judged_by_its_limit() -> None:
    low, middle, high = ends(20.0, 0.2, 3600.0, 100.0)
    assert low > 150.0
    assert 1000.0 < middle < 2500.0
    assert high > 2500.0


def test_what_is_known_exactly_has_no_spread() -> None:
    assert ends(500.0, 0.0, 900.0, 100.0) == (500.0, 500.0, 500.0)


def test_the_budget_counts_with_a_short_run_and_grows_with_what_is_done() -> None:
    def budget_s(done_s: float) -> float:
        ahead = Ahead.of(np.array([1000.0]), np.array([0.5]), np.array([4000.0]), np.array([done_s]))
        return float(ahead.budget_s(np.array([25.0]), np.array([0.0]))[0])

    assert budget_s(0.0) < 0.25 * 700.0
    assert budget_s(3000.0) >= 0.25 * 3000.0


def test_a_guest_that_stays_to_the_end_must_fit_whether_the_end_is_near_or_far() -> None:
    ahead = Ahead.of(np.array([1000.0]), np.array([0.5]), np.array([4000.0]), np.array([500.0]))
    bears = float(ahead.bears(np.array([25.0]), np.array([100.0]))[0])
    assert bears * float(ahead.left.high_s[0]) <= 0.25 * (500.0 + float(ahead.left.high_s[0])) - 100.0 + 1e-6
    assert bears * float(ahead.left.low_s[0]) <= 0.25 * (500.0 + float(ahead.left.low_s[0])) - 100.0 + 1e-6


def test_without_a_limit_what_has_run_for_long_will_run_for_long() -> None:
    hour, day = ends(600.0, 0.5, math.inf, 3600.0), ends(600.0, 0.5, math.inf, 86_400.0)
    assert 3600.0 < hour[0] < hour[1] < hour[2] < math.inf
    assert [a / b for a, b in zip(day, hour, strict=True)] == pytest.approx([24.0] * 3)


def test_where_nothing_is_known_jobs_are_expected_to_be_like_those_that_ended() -> None:
    work = SimulatedJobs(
        1, np.arange(40.0), np.full(40, 200.0), np.ones(40, np.int64), np.arange(40) % 2,
        MeasuredPairs(("a", "b"), np.ones((2, 2))), 0,
    )  # fmt: skip
    durations = Durations(work, "none")
    assert np.isinf(durations.limit_s).all()
    before = durations.expected_s[30]
    for job in range(20):
        durations.ended(job, shared=bool(job % 2))
    assert durations.expected_s[30] == pytest.approx(200.0) != before
    short, long = durations.ahead(np.array([30, 30]), np.array([10.0, 5000.0])).left.middle_s
    assert short < 200.0 < 2500.0 < long
