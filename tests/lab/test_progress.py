"""Work done while neighbours come and go, and the load that a job shows meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from gpushare_lab.emulator.card import Demand, SlotUse
from gpushare_lab.job import load
from gpushare_lab.job.progress import advance
from hypothesis import given
from hypothesis import strategies as st

ANYONE = Demand(50, 20, 1000)
SECOND = 1_000_000


def half_speed_each(neighbours: Sequence[Demand]) -> float:
    return float(0.5 ** len(neighbours))


def stay(since_s: float, until_s: float | None = None) -> SlotUse:
    return SlotUse(1, round(since_s * SECOND), None if until_s is None else round(until_s * SECOND), ANYONE)


def test_a_lone_job_does_a_second_of_work_in_a_second() -> None:
    assert advance(0, 4 * SECOND, 100, [], half_speed_each).work_s == 4


def test_a_neighbour_counts_from_its_arrival_to_its_end_however_late_it_is_seen() -> None:
    step = advance(0, 10 * SECOND, 100, [stay(2, 5)], half_speed_each)
    assert step.work_s == pytest.approx(2 + 1.5 + 5)
    assert step.rate == 1.0


def test_the_speed_at_the_end_is_told() -> None:
    assert advance(0, 10 * SECOND, 100, [stay(2), stay(4)], half_speed_each).rate == 0.25


def test_work_ends_at_the_very_moment_that_it_is_done() -> None:
    step = advance(0, 10 * SECOND, 3, [stay(2)], half_speed_each)
    assert (step.work_s, step.until_us) == (3, 4 * SECOND)


stays = st.lists(
    st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))).map(
        lambda pair: stay(pair[0], None if pair[1] is None else pair[0] + pair[1])
    ),
    max_size=4,
)


@given(stays, st.lists(st.integers(1, 10 * SECOND - 1), max_size=5))
def test_it_does_not_matter_how_often_a_job_looks(others: list[SlotUse], looks: list[int]) -> None:
    once = advance(0, 10 * SECOND, 100, others, half_speed_each).work_s
    edges = [0, *sorted(looks), 10 * SECOND]
    often = sum(advance(begin, end, 100, others, half_speed_each).work_s for begin, end in pairwise(edges))
    assert often == pytest.approx(once)


def shown(begin: float, end: float, rate: float = 1.0, seed: int = 1) -> float:
    return load.sample(ANYONE, begin, end, rate, 0, random.Random(seed)).sm_pct


def test_training_shows_the_stated_demand_and_loading_and_validation_less() -> None:
    loading, training, validation = (shown(at, at) for at in (0.01, 0.5, 0.95))
    assert loading < 20 < validation < 40 < training
    assert training == pytest.approx(50, abs=1)
    assert shown(2.1, 2.8) == pytest.approx(50, abs=1)


def test_a_slowed_job_uses_the_gpu_less_in_proportion() -> None:
    assert shown(0.5, 0.6, rate=0.4) == pytest.approx(20, abs=0.5)


def test_noise_is_repeatable_and_small() -> None:
    def series(seed: int) -> list[float]:
        noise = random.Random(seed)
        return [load.sample(ANYONE, 0.5, 0.6, 1.0, 0, noise).sm_pct for _ in range(200)]

    assert series(1) == series(1) != series(2)
    assert 49 < min(series(1)) < 49.6 < 50.4 < max(series(1)) < 51


def test_a_sample_longer_than_an_epoch_shows_its_mean() -> None:
    phases = 0.04 * 0.35 + 0.86 + 0.10 * 0.72
    assert load.mean_phase(0, 1).gpu == pytest.approx(phases)
    assert load.mean_phase(3.7, 8.7).gpu == pytest.approx(phases)


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5))
def test_however_work_is_cut_into_samples_the_mean_stays(a: float, b: float, c: float) -> None:
    low, middle, high = sorted((a, b, c))
    if high - low > 1e-3:
        parts = load.mean_phase(low, middle).gpu * (middle - low) + load.mean_phase(middle, high).gpu * (high - middle)
        assert load.mean_phase(low, high).gpu * (high - low) == pytest.approx(parts, abs=1e-6)
