"""Long jobs on second halves: after the short, on few cards, and sooner or later."""

from __future__ import annotations

import pytest
from world import NOW, card, decide, occupant, pending, places

from slurm_gpushare.helper.snapshot import Gpu, How

LONG = pending("long", expected_s=20_000, limit_s=40_000)


def busy(count: int) -> list[Gpu]:
    """Cards with a resident that has two days to go."""
    return [card(occupant(f"r{i}", expected_s=200_000, limit_s=400_000), index=i) for i in range(count)]


def pair(index: int) -> Gpu:
    """A card with two such jobs."""
    first, second = (occupant(f"{name}{index}", expected_s=200_000, limit_s=400_000) for name in "ab")
    return card(first, second, index=index)


def test_a_long_job_joins_a_long_one_where_enough_lanes_stay_open() -> None:
    assert places(decide(busy(40), [LONG]))["long"][2] is How.BESIDE
    assert places(decide(busy(20), [LONG])) == {}


def test_who_stays_twice_as_long_leaves_twice_as_many_lanes_open() -> None:
    longer = pending("longer", expected_s=40_000, limit_s=80_000)
    assert places(decide(busy(40), [longer])) == {}
    assert "longer" in places(decide(busy(80), [longer]))


def test_cards_with_two_long_jobs_count() -> None:
    assert places(decide([pair(0), *busy(39)][::-1], [LONG])) == {}
    assert "long" in places(decide([pair(80), *busy(79)], [LONG]))


@pytest.mark.parametrize(("waited_s", "joins"), [(19_000, False), (20_000, True)])
def test_who_has_waited_as_long_as_it_runs_has_waited_enough(waited_s: float, joins: bool) -> None:
    waiting = pending("long", expected_s=20_000, limit_s=40_000, eligible_s=NOW - waited_s)
    assert ("long" in places(decide(busy(2), [waiting]))) is joins


def test_no_long_job_joins_while_more_short_ones_wait_than_lanes_are_free() -> None:
    short = [pending(f"s{i}", mem_used_mib=12_000) for i in range(41)]  # they fit nowhere
    assert places(decide(busy(40), [*short, LONG])) == {}
    assert "long" in places(decide(busy(40), [*short[:40], LONG]))


def test_short_jobs_get_the_lanes_first() -> None:
    got = places(decide(busy(8), [LONG, *(pending(f"s{i}") for i in range(8))]))
    assert "long" not in got
    assert len(got) == 8


def test_a_long_job_keeps_both_promises() -> None:
    assert (
        places(decide(busy(8), [pending("long", token="gs-p", expected_s=20_000, limit_s=40_000, max_isd_pct=10)]))
        == {}
    )
