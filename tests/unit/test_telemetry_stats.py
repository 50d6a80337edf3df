from __future__ import annotations

import random
import statistics
import sys

import pytest

from slurm_gpushare.node.stats import StreamSummary, Summaries


def exact_p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


SHAPES = {
    "uniform": lambda noise: noise.uniform(0, 100),
    "two levels": lambda noise: noise.choice([20.0, 80.0]) + noise.uniform(-2, 2),
    "skewed": lambda noise: min(100.0, noise.expovariate(1 / 12)),
    "constant": lambda noise: 42.0,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [True, False])
def test_a_stream_gives_what_the_whole_list_would(shape: str, share: bool) -> None:
    noise = random.Random(shape)
    values = [SHAPES[shape](noise) for _ in range(5000)]
    summary = StreamSummary(share=share)
    for value in values:
        summary.add(value)
    stat = summary.stat()
    assert (stat.n, stat.max, stat.min) == (5000, round(max(values), 4), round(min(values), 4))
    assert stat.mean == pytest.approx(statistics.fmean(values), abs=1e-3)
    assert stat.sd == pytest.approx(statistics.pstdev(values), abs=1e-3)
    assert stat.p95 == pytest.approx(exact_p95(values), abs=0.5 if share else 1.5)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("share", [True, False])
def test_a_few_samples_are_enough(count: int, share: bool) -> None:
    summary = StreamSummary(share=share)
    for value in range(1, count + 1):
        summary.add(float(value))
    assert summary.stat().min <= summary.stat().p95 <= summary.stat().max == count


def test_a_large_offset_does_not_eat_the_deviation() -> None:
    summary = StreamSummary(share=False)
    for value in (1e9, 1e9 + 1, 1e9 + 2):
        summary.add(value)
    assert summary.stat().sd == pytest.approx((2 / 3) ** 0.5, abs=1e-3)


def footprint(summaries: Summaries) -> int:
    """Bytes of everything reachable from it."""
    seen: set[int] = set()

    def size(thing: object) -> int:
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        inside: list[object] = []
        if isinstance(thing, dict):
            inside = [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple):
            inside = list(thing)
        elif type(thing).__module__.startswith("slurm_gpushare"):
            names = [*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", {})]
            inside = [getattr(thing, name) for name in names]
        return sys.getsizeof(thing) + sum(size(one) for one in inside)

    return size(summaries)


def test_memory_does_not_grow_with_the_run() -> None:
    noise = random.Random(1)
    summaries = Summaries()

    for _ in range(20_000):
        summaries.add({"gpu_util_pct": noise.uniform(0, 100), "power_w": noise.uniform(40, 300)})
    assert footprint(summaries) < 32_768, "20,000 samples of two attributes would be 320,000 bytes and more"


def test_readings_out_of_range_count_as_the_nearest_possible() -> None:
    summaries = Summaries()
    summaries.add({"gpu_util_pct": 101.0})
    summaries.add({"gpu_util_pct": -3.0})
    stat = summaries.get("gpu_util_pct")
    assert stat is not None
    assert (stat.max, stat.min) == (100.0, 0.0)


def test_means_are_over_time_however_densely_it_was_sampled() -> None:
    """A first epoch is sampled five times as often as what follows."""
    seen = StreamSummary(share=True)
    for value, seconds in [(10.0, 0.5)] * 10 + [(30.0, 2.5)] * 2:
        seen.add(value, seconds)
    assert seen.stat().mean == pytest.approx(20.0)
    assert (seen.n, seen.stat().sd) == (12, pytest.approx(10.0))
