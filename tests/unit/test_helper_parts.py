"""The helper's memory: pairs and what they cost, when to look again, who runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from world import NOW, TOKEN_A, TOKEN_B, FakeSlurm, job, node, running

from slurm_gpushare.helper import log
from slurm_gpushare.helper.changes import adoptions, only_measured, untagged, withdrawals
from slurm_gpushare.helper.daemon import rest_s
from slurm_gpushare.helper.lease import Lock
from slurm_gpushare.helper.loop import at_once
from slurm_gpushare.helper.observe import expectation, observe
from slurm_gpushare.helper.occupancy import occupancy, placeable, startable
from slurm_gpushare.helper.pairs import Ledger, PairChanges, SpanKeeper, pairs_now, past_spans
from slurm_gpushare.helper.queue_facts import QueueFacts, TokenFacts
from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store.stored_jobs import EVER

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"


class Half:
    """Knowledge that believes in a rate of 0.5 for everybody."""

    def rates(self, victims: list[str], neighbours: list[str]) -> RateTable:
        half = np.full((len(victims), len(neighbours)), 0.5)
        return RateTable(half, half)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None: ...


class TestLedger:
    def pair(self) -> list[Job]:
        return [
            running("1", "n0", "gres/shard:v100_0:1", tag=TAG, start_s=NOW - 100),
            running("2", "n0", "gres/shard:v100_0:1", tag=f"GS1:c=0;t={TOKEN_B};o=gpu:1", start_s=NOW - 10),
        ]

    def test_what_a_neighbour_costs_adds_up_over_guests(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        turn = ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW)
        assert [(pair.resident.key, pair.guest.key) for pair in turn.begun] == [("1", "2")]
        assert ledger.sharing()[1].lost_s == pytest.approx(5.0), "ten seconds at half speed"
        assert ledger.sharing()[2].joined
        assert not ledger.sharing()[1].joined
        turn = ledger.follow(pairs_now(cards, Half(), NOW + 20), jobs, NOW + 20)
        assert turn.begun == ()
        assert ledger.sharing()[1].lost_s == pytest.approx(15.0)
        turn = ledger.follow({}, jobs[:1], NOW + 30)
        assert len(turn.ended) == 1
        assert ledger.sharing()[1].lost_s == pytest.approx(15.0), "what a past guest used is gone for good"
        assert 2 not in ledger.sharing()

    def test_a_clock_that_jumps_costs_nobody_anything(self) -> None:
        seconds = iter((0.0, 5.0))
        ledger, jobs = Ledger(lambda: next(seconds)), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW)
        ledger.follow(pairs_now(cards, Half(), NOW + 7200), jobs, NOW + 7200)
        assert ledger.sharing()[1].lost_s <= 5.0 + 3.0

    def test_a_successor_is_no_guest_whatever_the_store_remembers(self) -> None:
        ledger, (first, second) = Ledger(), self.pair()
        jobs = [first, replace(second, tag=parse_tag(f"{second.admin_comment};h=1"))]
        ledger.recall([Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 100, None, 0.8, 0.5)], NOW)
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW)
        assert not ledger.sharing()[2].joined

    def test_measured_rates_take_the_place_of_predicted_ones(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        (pair,) = ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW).begun
        ledger.measured(pair.key, 1.0, None)
        ledger.follow(pairs_now(cards, Half(), NOW + 100), jobs, NOW + 100)
        assert ledger.sharing()[1].lost_s == pytest.approx(0.0), "for all of the time together"
        assert ledger.sharing()[2].lost_s == pytest.approx(55.0)

    def test_a_pair_is_judged_once_both_rates_were_measured_and_stays_so(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        (pair,) = ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW).begun
        for rates, judged in (((1.0, None), False), ((1.0, 0.9), True), ((None, 0.9), True)):
            ledger.measured(pair.key, *rates)
            ledger.follow(pairs_now(cards, Half(), NOW + 10), jobs, NOW + 10)
            assert {cost.judged for cost in ledger.sharing().values()} == {judged}

    def test_rates_are_predicted_once_for_a_pair(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW)
        again = pairs_now(cards, None, NOW + 5, ledger.pairs)  # type: ignore[arg-type]
        assert again == ledger.pairs

    def test_a_new_helper_takes_up_what_the_store_remembers(self) -> None:
        ledger = Ledger()
        ledger.recall([Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 100, None, 0.8, 0.5)], NOW)
        assert ledger.sharing()[1].lost_s == pytest.approx(20.0)
        assert ledger.sharing()[2].joined

    def test_paused_time_is_kept_for_those_who_read_spans(self, tmp_path: Path) -> None:
        ledger, (first, second) = Ledger(), self.pair()
        still = [first, replace(second, state="SUSPENDED")]
        with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
            keeper = SpanKeeper(store, where_ended({}))
            for at_s, jobs in ((0, [first, second]), (100, [first, second]), (160, still), (400, still)):
                cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
                at_once(keeper.keep(ledger.follow(pairs_now(cards, Half(), NOW + at_s), jobs, NOW + at_s), NOW + at_s))
            assert [span.paused_s for span in store.sharing.open()] == [300]
            at_once(keeper.keep(ledger.follow({}, [first], NOW + 410), NOW + 410))
            (span,) = store.sharing.of_jobs({1: EVER})
            assert (span.paused_s, span.end_s) == (300, NOW + 410)

    def test_a_new_helper_leaves_the_pauses_of_past_and_present_guests_out(self) -> None:
        ledger = Ledger()
        past = Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 900, NOW - 500, 0.8, 0.5, paused_s=300)
        lasts = Span(1, 3, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 400, None, 0.8, 0.5, paused_s=100)
        before = Span(9, 3, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 900, NOW - 500, 0.8, 0.5, paused_s=50)
        ledger.recall([past, before, lasts], NOW, {3: 250.0})
        assert ledger.sharing()[1].lost_s == pytest.approx(100 * 0.2 + (400 - 200) * 0.2)


def where_ended(ended: dict[int, int]) -> FakeSlurm:
    """Slurm for a helper that starts: it knows when jobs ended."""
    over = {"state": "COMPLETED"}
    return FakeSlurm(
        running(str(key), "n0", "gres/shard:v100_0:1", end_s=end_s, **over) for key, end_s in ended.items()
    )


class TestAHelperThatStartsAgain:
    """Job 1 still runs. Job 2 was its guest an hour ago, job 3 until a helper went away; both have ended."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
            store.sharing.begin(
                [
                    Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 3600, None, 0.8, 0.5),
                    Span(1, 3, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 1000, None, 0.8, 0.5),
                    Span(7, 8, TOKEN_A, TOKEN_B, "n1", 0, "V100", NOW - 1000, None, 0.8, 0.5),
                ]
            )
            first = next(span for span in store.sharing.open() if span.guest_job == 2)
            store.sharing.end({first.id: NOW - 3500})
            store.live.beat("helper", NOW - 600)
            yield store

    def resumed(self, store: Store, ended: dict[int, int], dry_run: bool = False) -> Ledger:
        jobs = [running("1", "n0", "gres/shard:v100_0:1", tag=TAG, start_s=NOW - 4000)]
        ledger = Ledger()
        ledger.recall(past_spans(store, where_ended(ended), jobs, NOW, dry_run), NOW)
        ledger.follow({}, jobs, NOW)
        return ledger

    def test_a_resident_keeps_what_it_lost_to_past_guests(self, store: Store) -> None:
        ledger = self.resumed(store, {3: NOW - 500, 7: NOW - 200, 8: NOW - 100})
        assert ledger.sharing()[1].lost_s == pytest.approx(0.2 * (100 + 500))

    def test_pairs_that_came_apart_meanwhile_are_ended_when_the_first_of_the_two_was(self, store: Store) -> None:
        self.resumed(store, {3: NOW - 500, 7: NOW - 200, 8: NOW - 100})
        assert store.sharing.open() == []
        assert [span.end_s for span in store.sharing.of_jobs({3: EVER})] == [NOW - 500]
        assert [span.end_s for span in store.sharing.of_jobs({7: EVER})] == [NOW - 200]

    def test_what_slurm_has_forgotten_ended_when_the_last_helper_did(self, store: Store) -> None:
        ledger = self.resumed(store, {})
        assert [span.end_s for span in store.sharing.of_jobs({3: EVER})] == [NOW - 600]
        assert ledger.sharing()[1].lost_s == pytest.approx(0.2 * (100 + 400))

    def test_a_dry_run_writes_nothing(self, store: Store) -> None:
        ledger = self.resumed(store, {3: NOW - 500}, dry_run=True)
        assert len(store.sharing.open()) == 2
        assert ledger.sharing()[1].lost_s == pytest.approx(0.2 * (100 + 500))


class TestSpansOfAHelperThatRuns:
    """Jobs 1 and 2 share a card; then 2 ends."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
            yield store

    def turns(self) -> tuple[PairChanges, PairChanges]:
        ledger = Ledger()
        jobs = [running(key, "n0", "gres/shard:v100_0:1", tag=TAG, start_s=NOW - 60 + int(key)) for key in "12"]
        cards = occupancy([node(used="shard:v100_0:2(2/2,0/2)")], jobs)
        return ledger.follow(pairs_now(cards, Half(), NOW), jobs, NOW), ledger.follow({}, jobs[:1], NOW + 40)

    def test_a_span_ends_when_its_job_did_and_not_when_that_was_seen(self, store: Store) -> None:
        begun, ended = self.turns()
        keeper = SpanKeeper(store, where_ended({2: NOW + 12}))
        at_once(keeper.keep(begun, NOW))
        at_once(keeper.keep(ended, NOW + 40))
        assert [(span.start_s, span.end_s) for span in store.sharing.of_jobs({1: EVER})] == [(NOW - 58, NOW + 12)]

    def test_a_write_that_fails_loses_neither_begin_nor_end(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, ended = self.turns()
        keeper = SpanKeeper(store, where_ended({}))
        for turn, method in ((begun, "begin"), (ended, "end")):
            with monkeypatch.context() as broken:
                broken.setattr(store.sharing, method, Mock(side_effect=StoreError("the disk is full")))
                with pytest.raises(StoreError):
                    at_once(keeper.keep(turn, NOW + 40))
        at_once(keeper.keep(PairChanges((), (), {}), NOW + 90))
        assert [(span.start_s, span.end_s) for span in store.sharing.of_jobs({1: EVER})] == [(NOW - 58, NOW + 40)]


@pytest.mark.parametrize(("ended_s", "free"), [(NOW - 2, True), (NOW - 40, False), (None, False)])
def test_a_card_whose_job_has_ended_is_free_unless_its_epilog_hangs(ended_s: int | None, free: bool) -> None:
    ending = running("1", "n0", "gres/gpu:1", state="COMPLETING", end_s=ended_s, cpus=60)
    look = node(used="gpu:v100_0:1(IDX:0)", cpus_alloc=64)
    view = observe([ending], [look], parse_config("Partitions=gpu\nLeaseSeconds=30"), QueueFacts(), NOW)
    assert [not gpu.occupants for gpu in view.snapshot.gpus] == [free, True]
    assert view.snapshot.nodes["n0"].cpus_free == (60 if free else 0)


class TestWhoMayBePlaced:
    def test_a_leased_job_is_startable_and_one_with_its_own_begin_time_is_not(self) -> None:
        assert startable(job(tag=f"{TAG};l=1", eligible_s=NOW + 20, reason="BeginTime"), NOW)
        assert not startable(job(tag=TAG, eligible_s=NOW + 20, reason="BeginTime"), NOW)

    @pytest.mark.parametrize(
        "changes",
        [
            {"priority": 0}, {"dependency": "afterok:1(unfulfilled)"}, {"reason": "QOSGrpGRES"}, {"exclusive": True},
            {"num_nodes": 2}, {"per_gpu_extras": True}, {"features": "[a|b]"}, {"per_job": "gres/gpu:1"}, {"het": True},
        ],
    )  # fmt: skip
    def test_jobs_that_shards_cannot_serve_are_left_alone(self, changes: dict[str, object]) -> None:
        assert placeable(job(tag=TAG), NOW)
        assert not placeable(job(tag=TAG, **changes), NOW)

    def test_no_token_no_place(self) -> None:
        assert not placeable(job(), NOW)
        assert not placeable(job(tag=f"GS1:probe;t={TOKEN_A}"), NOW)


class TestAdoption:
    @pytest.mark.parametrize("tag", [f"GS1:probe;t={TOKEN_A}", f"GS1:c=1;t={TOKEN_A}", f"GS1:t={TOKEN_A}"])
    def test_a_job_whose_owner_takes_the_token_off_loses_its_tag(self, tag: str) -> None:
        waiting = job("7", admin_comment=f"ticket-9 {tag}")
        for started in (waiting, replace(waiting, state="RUNNING")):
            found = withdrawals(only_measured([started]), {"7": "grant 7"})
            assert [change.fields for _, change in found] == [{"AdminComment": "ticket-9"}]

    def test_a_job_keeps_its_tag_while_its_comment_has_the_token_or_is_not_known(self) -> None:
        jobs = [job(key, tag=f"GS1:probe;t={TOKEN_A}") for key in "12"]
        assert withdrawals(only_measured(jobs), {"1": f"gpushare:{TOKEN_A},max=5"}) == []
        changed = job("3", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1")  # the hook itself lets such a job out
        assert only_measured([changed, job("4", tag="")]) == []

    def test_a_job_that_the_hook_missed_is_tagged_and_nothing_else(self) -> None:
        comments = {"7": f"gpushare:{TOKEN_A}"}
        ((missed, change),) = adoptions(untagged([job("7"), job("8")], ["gpu"], 2), comments, lambda token, uid: None)
        assert change.fields == {"AdminComment": f"GS1:probe;t={TOKEN_A}"}
        ((_, change),) = adoptions([missed], comments, lambda token, uid: 1)
        assert change.fields == {"AdminComment": f"GS1:c=1;t={TOKEN_A}"}

    def test_several_gpus_or_another_partition_are_not_ours(self) -> None:
        others = [job(per_node="gres/gpu:2"), job(partitions=("debug",)), job(state="COMPLETED")]
        assert untagged(others, ["gpu"], 2) == []
        assert adoptions([job()], {"1": "something else"}, lambda token, uid: None) == []


def test_a_second_helper_is_told_who_runs(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(GpushareError, match="a helper runs already"), Lock(tmp_path):
        pass
    with Lock(tmp_path):
        pass


def test_a_slow_tick_is_followed_by_a_longer_rest() -> None:
    assert rest_s(5.0, 0.1, 60.0) == (5.0, 1.0), "news may come sooner, once a second"
    assert rest_s(5.0, 7.0, 60.0) == (14.0, 14.0)


def test_a_tick_in_which_the_helper_stood_still_is_followed_by_a_short_rest() -> None:
    assert rest_s(5.0, 400.0, 60.0) == (15.0, 15.0), "it would be taken for dead"


def test_log_lines_stay_one_line_whatever_is_in_them() -> None:
    assert log.line("place", job="14", why='a "quote"\nand more', none=None) == (
        'event=place job=14 why="a \\"quote\\" and more"'
    )


def test_the_helper_expects_what_a_tokens_history_and_the_jobs_own_limit_say() -> None:
    facts = TokenFacts(duration_s=400.0, duration_scatter=0.05, runs=9)
    assert 400.0 < expectation(job("1", limit_s=1800), facts).middle_s < 500.0
    given_back = job("1", limit_s=1800 + 600, tag="GS1:c=1;x=10")
    assert expectation(given_back, facts) == expectation(job("1", limit_s=1800), facts)
