"""The rules of the plan, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from world import BESIDE_RESIDENT, NOW, NOWHERE, SETTINGS, Flat, card, changed, decide, occupant, only, pending, places

from slurm_gpushare.helper.durations import RecentDurations
from slurm_gpushare.helper.snapshot import LEAST_CAP_PCT, How, NodeRoom, Plan, Snapshot


def test_an_idle_card_is_taken_before_anything_is_shared() -> None:
    got = decide([card(occupant()), card(index=1)], [pending()])
    assert places(got) == {"p": ("n1", 1, How.ALONE)}


def test_a_short_job_joins_a_resident_and_the_plan_says_why() -> None:
    placement = only(decide([card(occupant())], [pending()]))
    assert (placement.how, placement.partner_key) == (How.BESIDE, "r")
    reasons = placement.reasons
    assert reasons.guest_isd_pct == pytest.approx(25)
    assert reasons.shared_s == pytest.approx(375)
    assert reasons.resident_isd_pct == pytest.approx(0.75)  # 20 % of 375 s, of a run of 10 000 s
    assert reasons.gain_s is not None
    assert reasons.gain_s > 0


def test_two_pending_jobs_may_go_to_one_card_together() -> None:
    got = decide([card()], [pending("a", expected_s=5000, limit_s=9000), pending("b")])
    assert places(got) == {"a": ("n1", 0, How.ALONE), "b": ("n1", 0, How.TOGETHER)}


def test_whole_cards_go_in_priority_order() -> None:
    jobs = [pending("high", expected_s=9000, limit_s=9900), pending("low", expected_s=10_000, limit_s=10_000)]
    assert places(decide([card()], jobs))["high"] == ("n1", 0, How.ALONE)


def test_an_idle_card_is_left_to_a_job_of_others_that_ranks_higher() -> None:
    other = pending("other", token=None)
    got = decide([card()], [other, pending()])
    assert places(got) == NOWHERE
    assert [left.key for left in got.left] == ["p"]
    assert places(decide([card()], [pending(), other])) == {"p": ("n1", 0, How.ALONE)}


@pytest.mark.parametrize(
    "resident",
    [
        pytest.param({"token": None}, id="did not opt in"),
        pytest.param({"whole": True}, id="holds the whole card"),
        pytest.param({"mem_used_mib": 12_000}, id="memory of both with headroom does not fit"),
        pytest.param({"mem_used_mib": None}, id="memory unknown"),
        pytest.param({"max_isd_pct": 0.0}, id="its owner wants no slow-down"),
        pytest.param({"lost_s": 990.0, "expected_s": 4000.0}, id="past guests have used its budget"),
        pytest.param({"limit_s": 10_300.0, "may_grow_s": 0.0}, id="would pass its time limit less the margin"),
    ],
)
def test_nobody_joins_a_resident_that(resident: dict[str, Any]) -> None:
    assert places(decide([card(occupant(**resident))], [pending()])) == NOWHERE


def test_nobody_shares_when_a_whole_card_is_free_soon_enough() -> None:
    other = occupant("other", token=None, expected_s=1010.0)  # ends in 10 s; beside "r" the job would take 75 s longer
    assert places(decide([card(occupant()), card(other, index=1)], [pending()])) == NOWHERE
    later = changed(other, expected_s=2000.0)
    assert places(decide([card(occupant()), card(later, index=1)], [pending()])) == BESIDE_RESIDENT


def test_a_guest_that_outlasts_its_resident_costs_it_only_the_time_together() -> None:
    resident = occupant(expected_s=2000.0)  # 1000 s are left, the budget is 500 s
    guest = pending(expected_s=3000, limit_s=9000)  # would cost 750 s, but they are together for 1250 s only
    reasons = only(decide([card(resident)], [guest])).reasons
    assert reasons.shared_s == pytest.approx(1250)
    assert reasons.resident_isd_pct == pytest.approx(100 * 250 / 2000)
    assert reasons.guest_isd_pct == pytest.approx(100 * 250 / 3000)  # alone from then on
    spent = replace(resident, lost_s=300.0)
    assert places(decide([card(spent)], [guest])) == NOWHERE


@pytest.mark.parametrize(
    "guest",
    [
        pytest.param({"expected_s": 6100, "limit_s": 20_000}, id="is long: over three mean durations"),
        pytest.param({"limit_s": 390, "may_grow_s": 0.0}, id="would pass its time limit"),
        pytest.param({"mem_used_mib": None}, id="has no memory profile"),
        pytest.param({"max_isd_pct": 20.0}, id="asked for less slow-down than it would get"),
        pytest.param({"cpus": 33}, id="needs more CPUs than the node has"),
        pytest.param({"node_mem_mib": 100_001}, id="needs more memory than the node has"),
        pytest.param({"features": frozenset(["a100"])}, id="wants a feature that is not there"),
        pytest.param({"partitions": frozenset(["other"])}, id="is of another partition"),
        pytest.param({"nodes_wanted": frozenset(["n2"])}, id="wants another node"),
        pytest.param({"nodes_excluded": frozenset(["n1"])}, id="excludes the node"),
        pytest.param({"reservation": "course"}, id="belongs to a reservation elsewhere"),
        pytest.param({"gpus": 2}, id="wants two GPUs"),
    ],
)
def test_no_half_for_a_job_that(guest: dict[str, Any]) -> None:
    assert places(decide([card(occupant())], [pending(**guest)])) == NOWHERE


@pytest.mark.parametrize(
    "node",
    [
        pytest.param({"usable": False}, id="drained"),
        pytest.param({"reservation": "course"}, id="reserved"),
        pytest.param({"reserved_from_s": NOW + 599}, id="reserved before the job's limit ends"),
    ],
)
def test_a_node_is_left_alone_when(node: dict[str, Any]) -> None:
    nodes = [replace(NodeRoom("n1", 32, 100_000), **node)]
    assert places(decide([card(occupant())], [pending()], nodes)) == NOWHERE
    assert places(decide([card()], [pending()], nodes)) == NOWHERE


def test_a_card_in_exclusive_process_mode_is_never_shared() -> None:
    assert places(decide([card(occupant(), exclusive_process=True)], [pending()])) == NOWHERE
    assert only(decide([card(exclusive_process=True)], [pending()])).how is How.UNSHARED


def test_at_most_two_a_card() -> None:
    full = card(occupant("r1"), occupant("r2"))
    assert places(decide([full], [pending()])) == NOWHERE


def test_a_guest_is_never_slowed_by_more_than_the_cap() -> None:
    assert places(decide([card(occupant())], [pending()], knowledge=Flat(0.66))) == NOWHERE
    assert places(decide([card(occupant())], [pending()], knowledge=Flat(0.67))) == BESIDE_RESIDENT


def test_promises_are_kept_on_the_pessimistic_rate() -> None:
    long = pending(expected_s=3000, limit_s=9000)
    assert places(decide([card(occupant())], [long], knowledge=Flat(0.8))) == BESIDE_RESIDENT
    assert places(decide([card(occupant())], [long], knowledge=Flat(0.8, low=0.5))) == NOWHERE


def test_an_uncertain_guest_is_tried_where_it_gains_even_at_worst() -> None:
    """It waits 500 s for the card; at a rate of 0.5 it and what it costs its resident take three times its duration."""
    unsure, soon = Flat(0.8, low=0.5), occupant(expected_s=1500, limit_s=2000)
    for expected_s, where in ((240, BESIDE_RESIDENT), (260, NOWHERE)):
        got = decide([card(soon)], [pending(expected_s=expected_s)], knowledge=unsure)
        assert places(got) == where
        assert all(placement.reasons.explored for placement in got.placements)


def test_where_nobody_can_be_stopped_a_trial_fits_the_residents_budget_at_worst() -> None:
    unsure, unwatched = Flat(0.65, low=0.4), replace(SETTINGS, stops=False)
    # 25 % of 10 000 s is 2500 s; at a rate of 0.4 a guest costs one and a half times its duration.
    for expected_s, where in ((1660, BESIDE_RESIDENT), (1670, NOWHERE)):
        guest = pending(expected_s=expected_s, limit_s=2000)
        assert places(decide([card(occupant())], [guest], knowledge=unsure, settings=unwatched)) == where


def test_an_uncertain_guest_that_could_lose_much_waits_unless_its_resident_leaves_it_in_time() -> None:
    """In 150 s the card is free: at worst they are 375 s together, which costs it 225; that is half of 450."""
    unsure, ending = Flat(0.7, low=0.4), occupant(expected_s=1150, limit_s=2000)
    for expected_s, where in ((440, NOWHERE), (460, BESIDE_RESIDENT)):
        assert places(decide([card(ending)], [pending(expected_s=expected_s)], knowledge=unsure)) == where


def test_a_workload_is_tried_once_at_a_time() -> None:
    """Its second job waits for the verdict of the first: until both rates are known, 20 s at the longest."""
    unsure, two = Flat(0.65, low=0.4), [pending("p"), pending("q")]
    cards = [card(occupant()), card(occupant("s"), index=1)]
    assert len(places(decide(cards, two, knowledge=unsure))) == 1
    for began_s, judged, found in ((10, False, 0), (10, True, 1), (30, False, 1)):
        pair = occupant(judged=judged), occupant("g", start_s=NOW - began_s, judged=judged)
        tried = card(*pair, index=1)
        assert len(places(decide([card(occupant("s")), tried], two[:1], knowledge=unsure))) == found


def test_a_guest_does_not_outlast_its_resident_while_a_higher_job_needs_the_card_whole() -> None:
    resident = occupant(limit_s=12_000)  # 11 000 s are left
    long_limit = pending(limit_s=11_001)
    higher = pending("higher", token=None, gpus=4)
    elsewhere = replace(higher, partitions=frozenset(["other"]))
    assert places(decide([card(resident)], [higher, long_limit])) == NOWHERE
    assert places(decide([card(resident)], [higher, changed(long_limit, limit_s=11_000)])) == BESIDE_RESIDENT
    assert places(decide([card(resident)], [long_limit, higher])) == BESIDE_RESIDENT
    assert places(decide([card(resident)], [elsewhere, long_limit])) == BESIDE_RESIDENT
    unshared = pending("higher", max_isd_pct=0.0)
    assert places(decide([card(resident)], [unshared, long_limit])) == NOWHERE


def test_a_guest_is_gone_before_who_does_not_share_could_have_the_card() -> None:
    """Limits are long; what counts for somebody of higher priority is when the resident is expected to end."""
    resident = occupant(limit_s=12_000, expected_s=2000)  # 1000 s are expected of it
    higher = pending("higher", token=None)
    short, long = pending(expected_s=300), pending(expected_s=1010, limit_s=2000)
    for guest in (short, long):
        assert places(decide([card(resident)], [guest])) == BESIDE_RESIDENT
        assert places(decide([card(resident)], [guest, higher])) == BESIDE_RESIDENT, "it comes first"
    assert places(decide([card(resident)], [higher, short], knowledge=Flat(0.999))) == BESIDE_RESIDENT
    assert places(decide([card(resident)], [higher, long], knowledge=Flat(0.999))) == NOWHERE


def test_nobody_slows_who_has_the_card_that_one_who_does_not_share_gets_next() -> None:
    """That job would start so much later. On the other cards, which are free later, guests are welcome."""
    soon, later = (occupant(name, limit_s=12_000, expected_s=seconds) for name, seconds in (("r", 2000), ("s", 9000)))
    higher, guest = pending("higher", token=None), pending(expected_s=300)
    assert places(decide([card(soon)], [higher, guest])) == NOWHERE
    assert places(decide([card(soon)], [guest, higher])) == BESIDE_RESIDENT, "it comes first"
    both = [card(soon), *(card(later, index=index) for index in range(1, 5))]
    assert places(decide(both[:2], [higher, guest]))["p"][1] == 1
    two = replace(higher, gpus=2)
    kept = [card(soon), card(later, index=1), card(replace(later, key="t"), index=2)]
    assert places(decide(kept[:2], [two, guest])) == NOWHERE


def test_the_card_that_is_free_first_is_kept_for_the_head_of_the_queue() -> None:
    resident = occupant(limit_s=12_000)
    soon = pending("head", expected_s=6100, limit_s=20_000, mem_used_mib=15_000)  # too big for a guest
    guest = pending(limit_s=11_001)
    assert places(decide([card(resident)], [soon, guest])) == BESIDE_RESIDENT
    head = replace(soon, eligible_s=NOW - 6100)  # it has waited for as long as it runs
    assert places(decide([card(resident)], [head, guest])) == NOWHERE
    sooner = occupant("sooner", expected_s=9000, limit_s=9000)  # the head is content with half of the other card
    assert places(decide([card(resident), card(sooner, index=1)], [head, guest])) == BESIDE_RESIDENT


@pytest.mark.parametrize(("across", "who"), [("account", {"account": "physics"}), ("user", {"user": "ann"})])
def test_share_across(across: str, who: dict[str, str]) -> None:
    settings = replace(SETTINGS, share_across=across)
    assert places(decide([card(occupant())], [pending()], settings=settings)) == NOWHERE
    assert places(decide([card(occupant())], [pending(**who)], settings=settings)) == BESIDE_RESIDENT


def test_two_that_broke_a_promise_never_meet_again() -> None:
    got = decide([card(occupant())], [pending()], never_together=frozenset([("gs-p", "gs-r")]))
    assert places(got) == NOWHERE


def test_time_limits_bind_unless_the_site_extends_them() -> None:
    tight = pending(limit_s=310)
    fixed = replace(SETTINGS, extend_time_limit=False)
    assert places(decide([card(occupant())], [tight], settings=fixed)) == NOWHERE
    assert places(decide([card(occupant())], [tight])) == BESIDE_RESIDENT


def test_a_limit_that_cannot_grow_binds_although_the_site_extends_limits() -> None:
    at_the_most = pending(limit_s=310, may_grow_s=0.0)
    assert places(decide([card(occupant())], [at_the_most])) == NOWHERE
    last_minutes = occupant(limit_s=10_100, may_grow_s=0.0)
    assert places(decide([card(last_minutes)], [pending()])) == NOWHERE


def test_of_an_uncertain_duration_the_long_end_decides_about_the_promise_and_the_middle_about_the_gain() -> None:
    exact, vague = (
        pending(expected_s=1000, limit_s=20_000),
        pending(expected_s=1000, limit_s=20_000, expected_spread=1.5),
    )
    resident = occupant(expected_s=5000)
    harsh = Flat(0.75)
    assert only(decide([card(resident)], [exact], knowledge=harsh)).reasons.shared_s == pytest.approx(1333, abs=1.0)
    assert places(decide([card(resident)], [vague], knowledge=harsh)) == NOWHERE


def test_of_a_resident_without_a_known_end_only_what_is_done_counts() -> None:
    endless = occupant(limit_s=float("inf"), expected_s=float("inf"))
    assert places(decide([card(endless)], [pending(expected_s=100)])) == BESIDE_RESIDENT
    assert places(decide([card(endless)], [pending(expected_s=2000, limit_s=4000)])) == NOWHERE


def test_a_job_that_waited_long_is_served_first() -> None:
    jobs = [pending("new", expected_s=9000), pending("old", expected_s=9000, eligible_s=NOW - 2 * 86_400)]
    assert places(decide([card()], jobs))["old"] == ("n1", 0, How.ALONE)


@pytest.mark.parametrize("cap_pct", [0.0, LEAST_CAP_PCT - 1.0])
def test_a_job_whose_owner_wants_next_to_no_slow_down_gets_all_of_a_card(cap_pct: float) -> None:
    got = decide([card(), card(index=1)], [pending("a", max_isd_pct=cap_pct), pending("b"), pending("c")])
    assert places(got)["a"] == ("n1", 0, How.UNSHARED)
    assert places(got)["b"] == ("n1", 1, How.ALONE)
    assert places(got)["c"] == ("n1", 1, How.TOGETHER)


def test_cpus_of_a_node_are_given_out_once() -> None:
    gpus = [card(occupant("r1")), card(occupant("r2"), index=1)]
    got = decide(gpus, [pending("a"), pending("b")], [NodeRoom("n1", 7, 100_000)])
    assert len(got.placements) == 1


def test_as_many_guests_as_gain_get_a_half() -> None:
    """First fit would give the roomy card to the first job and leave the second without."""
    roomy, full = occupant("roomy", mem_used_mib=1000), occupant("full", mem_used_mib=9000)
    small, large = pending("small", mem_used_mib=2000, expected_s=200), pending("large", mem_used_mib=9000)
    got = decide([card(roomy), card(full, index=1)], [small, large])
    assert places(got) == {"small": ("n1", 1, How.BESIDE), "large": ("n1", 0, How.BESIDE)}


def test_jobs_left_to_slurm_come_with_their_expected_wait() -> None:
    ahead, behind = (pending(key, expected_s=9000, limit_s=20_000) for key in ("ahead", "behind"))
    first, second = decide([card(occupant())], [ahead, behind]).left
    assert (first.key, second.key) == ("ahead", "behind")
    assert first.wait_s is not None
    assert second.wait_s == first.wait_s + 9000


def test_policies_by_name() -> None:
    gpus = [card(occupant("heavy", cluster=2), index=0), card(occupant("light", cluster=0), index=1)]
    jobs = [pending("p", cluster=2, expected_s=9000, limit_s=20_000)]

    def how(policy: str) -> dict[str, tuple[str, int, How]]:
        return places(decide(gpus, jobs, knowledge=Flat(0.6), settings=replace(SETTINGS, policy=policy)))

    assert how("off") == NOWHERE
    assert how("gpushare") == NOWHERE
    assert how("fcfs") == {"p": ("n1", 0, How.BESIDE)}
    assert how("paper") == {"p": ("n1", 0, How.BESIDE)}, "by the shipped base: beside its own kind"
    complement = replace(SETTINGS, policy="paper", partners=(2, 1, 0))
    assert places(decide(gpus, jobs, knowledge=Flat(0.6), settings=complement)) == {"p": ("n1", 1, How.BESIDE)}
    assert how("random")["p"][2] is How.BESIDE


def test_an_empty_cluster_and_an_empty_queue() -> None:
    assert decide([], [pending()]).placements == ()
    assert decide([card(occupant())], []) == Plan()


def test_many_tokens_are_planned_in_blocks() -> None:
    gpus = [card(occupant(f"r{i}", token=f"gs-r{i}"), index=i) for i in range(600)]
    jobs = [pending(f"p{i}", token=f"gs-p{i}") for i in range(700)]
    got = decide(gpus, jobs, [NodeRoom("n1", 10**6, 10**9)])
    assert len(got.placements) == 600
    assert len({placement.place.first for placement in got.placements}) == 600


def test_a_long_job_that_stays_counts_once_among_the_jobs_of_late() -> None:
    def look(*expected: float) -> Snapshot:
        jobs = tuple(pending(str(s), expected_s=s) for s in expected)
        return Snapshot(NOW, (card(occupant("long", expected_s=9000.0)),), {}, jobs)

    lately = RecentDurations()
    assert lately.mean_s(Snapshot(NOW, (), {}, ())) == {}
    assert lately.mean_s(look())[1] == pytest.approx(9000)
    for short in range(100, 400):
        mean_s = lately.mean_s(look(float(short)))
    assert mean_s[1] < 300


def test_saving_fills_a_second_half_before_it_opens_another_card() -> None:
    cards = [card(occupant()), card(index=1)]
    assert places(decide(cards, [pending()])) == {"p": ("n1", 1, How.ALONE)}
    assert places(decide(cards, [pending()], settings=replace(SETTINGS, objective="saving"))) == BESIDE_RESIDENT


def test_saving_says_how_long_a_whole_card_would_have_taken() -> None:
    saving = replace(SETTINGS, objective="saving")
    assert only(decide([card(occupant()), card(index=1)], [pending()], settings=saving)).reasons.wait_s == 0.0
    assert (only(decide([card(occupant())], [pending()], settings=saving)).reasons.wait_s or 0.0) > 1000.0


def test_saving_opens_another_card_where_a_promise_forbids_to_join() -> None:
    cards, saving = [card(occupant(max_isd_pct=0.5)), card(index=1)], replace(SETTINGS, objective="saving")
    assert places(decide(cards, [pending()], settings=saving)) == {"p": ("n1", 1, How.ALONE)}


def test_saving_joins_nobody_where_both_together_take_no_less_time() -> None:
    cards, saving = [card(occupant()), card(index=1)], replace(SETTINGS, objective="saving", guest_cap_pct=300.0)
    alone = decide(cards, [pending()], settings=saving, knowledge=Flat(0.45))
    assert places(alone) == {"p": ("n1", 1, How.ALONE)}
