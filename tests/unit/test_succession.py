"""Who takes over a card whose sharer ends soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import NOW, NOWHERE, SETTINGS, Flat, card, changed, decide, occupant, only, pending, places

from slurm_gpushare.helper.snapshot import How, PendingJob

LATE = changed(occupant(), expected_s=1200.0, joined=True)
"""A former guest with 200 s to go: at a rate of 0.8 they take 250 s, 50 more, and 50 s of a neighbour's work."""
LONG = pending(expected_s=9000, limit_s=20_000)
"""Too long for a guest."""
SUCCEEDS = {"p": ("n1", 0, How.SUCCEEDS)}


def test_the_head_of_the_queue_takes_over_a_card_that_ends_soon() -> None:
    placement = only(decide([card(LATE)], [LONG]))
    assert (placement.how, placement.partner_key) == (How.SUCCEEDS, "r")
    reasons = placement.reasons
    assert reasons.wait_s == pytest.approx(200)
    assert reasons.shared_s == pytest.approx(250)
    assert reasons.guest_isd_pct == pytest.approx(100 * 50 / 9000)
    assert reasons.resident_isd_pct == pytest.approx(100 * 50 / 1200)
    assert reasons.resident_budget_pct == 50
    assert reasons.gain_s == pytest.approx(200 - 50 - 50)


def test_a_card_is_taken_over_only_if_both_together_end_sooner() -> None:
    assert places(decide([card(LATE)], [LONG], knowledge=Flat(0.7))) == SUCCEEDS  # they lose 86 s each, of 200
    assert places(decide([card(LATE)], [LONG], knowledge=Flat(0.6))) == NOWHERE  # 133 s each


def test_a_successor_is_promised_what_a_resident_is() -> None:
    """At worst they share for 400 s and it loses 200: a quarter of 800 s."""
    unsure = Flat(0.8, low=0.5)
    for expected_s, where in ((790, NOWHERE), (810, SUCCEEDS)):  # its owner lets nobody try it as a guest
        job = changed(LONG, expected_s=expected_s, max_isd_pct=49)
        assert places(decide([card(LATE)], [job], knowledge=unsure)) == where
    for max_isd_pct, where in ((5, NOWHERE), (6, SUCCEEDS)):  # 200 s of 3900 are 5.1 %
        job = changed(LONG, expected_s=3900, max_isd_pct=max_isd_pct)
        assert places(decide([card(LATE)], [job], knowledge=unsure)) == where


@pytest.mark.parametrize("others", [[], [pending("q", expected_s=9000, limit_s=20_000, max_isd_pct=10)]])
def test_what_a_successor_is_promised_does_not_depend_on_who_else_waits(others: list[PendingJob]) -> None:
    """At worst it loses 200 s of 300: two thirds, where guests are promised half and residents all."""
    settings, unsure = replace(SETTINGS, resident_budget_pct=100.0), Flat(0.8, low=0.5)
    job = changed(LONG, expected_s=300)
    assert places(decide([card(LATE)], [job, *others], knowledge=unsure, settings=settings)) == SUCCEEDS


@pytest.mark.parametrize(("lost_s", "where"), [(245, SUCCEEDS), (255, NOWHERE)])
def test_a_successor_keeps_the_promise_of_who_is_there(lost_s: float, where: dict[str, tuple[str, int, How]]) -> None:
    """A resident of 1200 s may lose 300; the successor costs it 50. A guest may lose 600."""
    resident = changed(LATE, joined=False, lost_s=lost_s, start_s=NOW - 1000 - lost_s)
    assert places(decide([card(resident)], [LONG])) == where
    assert places(decide([card(changed(resident, joined=True))], [LONG])) == SUCCEEDS


def test_a_successor_and_who_is_there_stay_within_their_limits() -> None:
    fixed = replace(SETTINGS, extend_time_limit=False)
    for there, job in (
        (LATE, changed(LONG, limit_s=9500)),  # 9050 s, of 9025
        (changed(LATE, limit_s=1260), LONG),  # 250 s, of 247
    ):
        assert places(decide([card(there)], [job], settings=fixed)) == NOWHERE
        assert places(decide([card(there)], [job])) == SUCCEEDS
    fitting = [card(changed(LATE, limit_s=1265))], [changed(LONG, limit_s=9530)]
    assert places(decide(*fitting, settings=fixed)) == SUCCEEDS


def test_no_card_is_taken_over_past_a_job_of_higher_priority_that_could_have_it() -> None:
    large = pending("large", expected_s=9000, limit_s=20_000, mem_used_mib=12_000)
    assert places(decide([card(LATE)], [large, LONG])) == NOWHERE
    assert places(decide([card(LATE)], [LONG, large])) == SUCCEEDS
    assert places(decide([card(LATE)], [pending("other", token=None), LONG])) == NOWHERE
    elsewhere = replace(large, partitions=frozenset(["other"]))
    assert places(decide([card(LATE)], [elsewhere, LONG])) == SUCCEEDS


def test_successors_choose_in_priority_order_the_card_that_is_free_first() -> None:
    sooner = changed(LATE, key="sooner", expected_s=1100.0)
    jobs = [changed(LONG, key=name) for name in "abc"]
    got = decide([card(LATE), card(sooner, index=1)], jobs)
    assert places(got) == {"a": ("n1", 1, How.SUCCEEDS), "b": ("n1", 0, How.SUCCEEDS)}


def test_a_card_whose_sharer_stays_long_is_not_taken_over() -> None:
    assert places(decide([card(occupant(expected_s=6900))], [LONG])) == SUCCEEDS
    assert places(decide([card(occupant(expected_s=7100))], [LONG])) == NOWHERE
