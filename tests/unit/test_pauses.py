"""Pausing who came last: the decision, whom nodes are told to stop, and what is done with what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from world import NOW, TOKEN_A, running

from slurm_gpushare.helper.promises import (
    DEAF_S,
    HEARD_S,
    REST_S,
    Mark,
    PauseHistory,
    Pauses,
    PauseStep,
    PromiseStatus,
    dying,
    next_step,
    release_paused,
)
from slurm_gpushare.protocol.record import Closed, Features, Period, Record, RecordKind, Scope, new_id
from slurm_gpushare.protocol.stop_orders import LONGEST_PAUSE_S, order_file, read_order
from slurm_gpushare.protocol.tag import Paused, Tag, parse_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job

FINE = PromiseStatus(50.0, 1000.0, lost_s=50.0, shared_s=200.0, loss=0.25, error=0.02)
SPENT = PromiseStatus(25.0, 1000.0, lost_s=248.0, shared_s=600.0, loss=0.4, error=0.02)


class TestDecision:
    def test_who_came_last_is_paused_when_the_residents_budget_is_spent(self) -> None:
        assert next_step(SPENT, FINE, PauseHistory(), NOW, 10.0) is PauseStep.PAUSE
        assert next_step(replace(SPENT, lost_s=100.0), FINE, PauseHistory(), NOW, 10.0) is PauseStep.LEAVE

    def test_nothing_is_done_about_what_was_not_measured_or_could_be_chance(self) -> None:
        assert next_step(replace(SPENT, measured=False), FINE, PauseHistory(), NOW, 10.0) is PauseStep.LEAVE
        assert next_step(replace(SPENT, error=0.3), FINE, PauseHistory(), NOW, 10.0) is PauseStep.LEAVE

    def test_no_pause_is_longer_than_five_minutes_and_a_run_comes_between_two(self) -> None:
        paused = PauseHistory(since_s=NOW - LONGEST_PAUSE_S, total_s=LONGEST_PAUSE_S)
        assert next_step(SPENT, FINE, paused, NOW, 10.0) is PauseStep.END
        assert next_step(SPENT, FINE, PauseHistory(ran_s=REST_S - 1.0), NOW, 10.0) is PauseStep.LEAVE

    def test_it_goes_on_when_the_resident_has_budget_again(self) -> None:
        paused = PauseHistory(since_s=NOW - 60.0, total_s=60.0)
        assert next_step(SPENT, FINE, paused, NOW, 10.0) is PauseStep.LEAVE
        assert next_step(replace(SPENT, run_s=1200.0), FINE, paused, NOW, 10.0) is PauseStep.RESUME

    @pytest.mark.parametrize("bound", [{"most_s": 100.0, "total_s": 95.0}, {"end_moves_s": 5.0}])
    def test_pauses_are_bounded_in_all_and_by_reservations(self, bound: dict[str, float]) -> None:
        assert next_step(SPENT, FINE, PauseHistory(**bound), NOW, 10.0) is PauseStep.LEAVE
        assert next_step(SPENT, FINE, PauseHistory(since_s=NOW - 60.0, **bound), NOW, 10.0) is PauseStep.END

    def test_the_promise_of_the_job_whose_profile_was_true_comes_first(self) -> None:
        no_more = replace(FINE, lost_s=500.0)
        assert next_step(SPENT, no_more, PauseHistory(), NOW, 10.0) is PauseStep.PAUSE
        assert next_step(SPENT, no_more, PauseHistory(), NOW, 10.0, guest_first=True) is PauseStep.LEAVE


def guest(extra: str = f";p={NOW}s", state: str = "RUNNING") -> Job:
    tag = f"GS1:c=1;t={TOKEN_A};o=gpu:1{extra}"
    return running("7", "n0", "gres/shard:v100_0:1", tag=tag, state=state, start_s=NOW - 500)


def said(at_s: float, stopped_s: float = 0.0, woken: int = 0) -> Record:
    return Record(
        new_id(), new_id(), 1, RecordKind.INTERIM, Scope.JOB, 7, "n0", 0, "V100", NOW - 500.0, at_s, Closed.OPEN,
        Features(), Period(), Period(), Period(), stopped_s=stopped_s, woken=woken,
    )  # fmt: skip


def told(pauses: Pauses, now_s: float) -> dict[str, set[int]]:
    return {node: set(order.jobs) for node, order in pauses.orders(now_s).items()}


def tag_of(mark: Mark) -> Tag:
    tag = parse_tag(mark.change.fields["AdminComment"])
    assert tag is not None
    return tag


@pytest.fixture
def pauses() -> Pauses:
    """The guest stands still since `NOW`."""
    pauses = Pauses()
    pauses.begin(guest(), NOW)
    pauses.orders(NOW)
    return pauses


def look(pauses: Pauses, at_s: float, *records: Record, state: str = "RUNNING") -> list[Job]:
    jobs = {7: guest(state=state)}
    pauses.take(records, jobs)
    return pauses.look(jobs, at_s)


class TestOrders:
    def test_a_node_is_told_at_each_look_and_once_more_after_the_last(self, pauses: Pauses) -> None:
        first = pauses.orders(NOW)["n0"]
        second = pauses.orders(NOW)["n0"]
        assert (first.jobs, second.jobs) == ({7}, {7})
        assert second.number > first.number, "each look renews it, also where the clock stands still"
        pauses.end(7, "its neighbour has gone", NOW + 10)
        assert told(pauses, NOW + 10) == {"n0": set()}
        assert told(pauses, NOW + 20) == {}

    def test_a_job_that_is_ending_is_not_stopped(self, pauses: Pauses) -> None:
        look(pauses, NOW + 5, state="COMPLETING")
        assert told(pauses, NOW + 5) == {"n0": set()}

    def test_a_job_that_does_not_end_is_named_before_it_is_killed(self, pauses: Pauses) -> None:
        """So that its node ends its work on the card first; until then it may write a checkpoint."""
        job, conf = replace(guest(state="COMPLETING"), end_s=NOW), {"KillWait": "30 sec"}
        assert dying([job, guest()], conf, 10.0, NOW + 19) == []
        assert dying([job, guest()], conf, 10.0, NOW + 20) == [job]
        order = pauses.orders(NOW, [job])["n0"]
        assert (order.jobs, order.dying) == ({7}, {7})
        assert pauses.orders(NOW)["n0"].dying == set()

    def test_a_helper_that_stops_lets_all_go(self, pauses: Pauses) -> None:
        assert [order.jobs for order in pauses.let_all_go(NOW).values()] == [frozenset()]

    def test_a_node_that_knows_of_no_orders_gets_none_for_a_while(self, pauses: Pauses) -> None:
        """A sampler of an earlier release goes on sending records as if nothing were."""
        look(pauses, NOW + HEARD_S + 5, said(NOW + HEARD_S + 4))
        assert told(pauses, NOW + HEARD_S + 5) == {"n0": set()}
        assert not pauses.can_be_told(guest(), NOW + 60)
        assert pauses.can_be_told(guest(), NOW + 60 + DEAF_S)

    def test_a_node_that_has_stopped_it_is_told_on(self, pauses: Pauses) -> None:
        look(pauses, NOW + HEARD_S + 5, said(NOW + HEARD_S + 4, stopped_s=30.0))
        assert told(pauses, NOW + HEARD_S + 5) == {"n0": {7}}


class TestGoingOnByItself:
    def test_it_is_told_once_and_earns_no_time_but_stays_ordered(self, pauses: Pauses) -> None:
        assert look(pauses, NOW + 10, said(NOW + 8, 5.0, 1)) == [], "Slurm may have let it go on, to end it"
        assert [job.key for job in look(pauses, NOW + 15)] == ["7"], "it runs still"
        mark = pauses.mark_woken(guest(), "", NOW + 15)
        assert (tag_of(mark).paused, tag_of(mark).stopped_before_s) == (Paused(NOW + 15, True), 5)
        look(pauses, NOW + 20, said(NOW + 18, 5.0, 2))
        assert look(pauses, NOW + 25) == [], "one strike a pause"
        assert told(pauses, NOW + 25) == {"n0": {7}}

    def test_an_administrator_may_suspend_it_and_let_it_go_on(self, pauses: Pauses) -> None:
        assert look(pauses, NOW + 10, said(NOW + 8, 5.0, 1), state="SUSPENDED") == []
        assert look(pauses, NOW + 15) == []
        assert told(pauses, NOW + 15) == {"n0": {7}}


class TestTheMark:
    def test_it_is_taken_off_with_the_time_that_the_job_stood(self) -> None:
        pauses, job = Pauses(), guest(f";p={NOW - 90}s;q=10;s=10")
        (mark,) = pauses.marks([job], NOW)
        assert (tag_of(mark).paused, tag_of(mark).paused_before_s, tag_of(mark).stopped_before_s) == (None, 100, 100)

    def test_time_in_which_its_node_says_that_it_ran_is_none(self) -> None:
        pauses, job = Pauses(), guest(f";p={NOW - 90}s")
        pauses.take([said(NOW - 10, stopped_s=30.0)], {7: job})
        (mark,) = pauses.marks([job], NOW)
        assert tag_of(mark).stopped_before_s == 40, "30 s, and what came after the record"

    def test_who_stands_still_keeps_it(self, pauses: Pauses) -> None:
        assert pauses.marks([guest()], NOW + 5) == []


class Said(Slurm):
    """A Slurm that takes everything."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__(self._answer)

    def _answer(self, argv: Sequence[str]) -> str:
        self.said.append(" ".join(argv[:3]))
        return ""


@pytest.mark.parametrize(
    ("extra", "state", "said"),
    [
        (f";p={NOW}", "SUSPENDED", ["scontrol resume 7", "scontrol update JobId=7"]),
        (f";p={NOW}s", "STOPPED", ["scancel --full --signal=CONT", "scontrol update JobId=7"]),
        (f";p={NOW}s", "RUNNING", ["scontrol update JobId=7"]),
        (f";p={NOW}s", "SUSPENDED", ["scontrol update JobId=7"]),
        ("", "SUSPENDED", []),
    ],
    ids=["0.x suspended it", "0.x stopped it", "its node stops it", "... and its administrator too", "not ours"],
)
def test_release_lets_everybody_go_on_whom_we_stopped(tmp_path: Path, extra: str, state: str, said: list[str]) -> None:
    slurm = Said()
    release_paused(slurm, [guest(extra, state)], tmp_path)
    assert slurm.said == said
    order = read_order(order_file(tmp_path, "n0"), "root")
    assert (order is not None and not order.jobs) is bool(said)
