"""The helper's memory: placements that came to nothing, pairs and what they cost, when to look again, who runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slurm_things import NOW, TOKEN_A, TOKEN_B, job, node, running

from slurm_gpushare.config import parse_config
from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.adopt import adoptions, asked_token
from slurm_gpushare.coschedule.ledger import Ledger, pairs_now
from slurm_gpushare.coschedule.lock import Lock
from slurm_gpushare.coschedule.nudge import Nudge
from slurm_gpushare.coschedule.observe import Facts, Workload, expectation, observe, placeable, startable
from slurm_gpushare.coschedule.occupancy import occupancy
from slurm_gpushare.coschedule.snapshot import DurationSource
from slurm_gpushare.coschedule.takeback import Placements
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.knowledge.rates import RateTable
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import parse_tag
from slurm_gpushare.store.sharing import Span

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"


class Half:
    """Knowledge that believes in a rate of 0.5 for everybody."""

    def rates(self, victims: list[str], neighbours: list[str]) -> RateTable:
        half = np.full((len(victims), len(neighbours)), 0.5)
        return RateTable(half, half)

    def observe(self, victim: str, neighbour: str, rate: float, weight: float = 1.0) -> None: ...


def placed(**changes: object) -> Job:
    values = {"tag": f"{TAG};g=n0:1", "per_node": "gres/shard:v100_1:1", "wanted_nodes": "n0"} | changes
    return job("5", **values)


class TestTakingBack:
    def test_a_placement_has_its_time_to_start(self) -> None:
        placements = Placements(bound_s=30)
        placements.sent(placed(), NOW)
        nodes = {"n0": node()}
        assert placements.overdue([placed()], nodes, NOW + 29) == []
        ((_, why),) = placements.overdue([placed()], nodes, NOW + 31)
        assert "within 30 s" in why

    @pytest.mark.parametrize(
        ("now", "reason"),
        [
            (placed(priority=0), "held"),
            (placed(reason="QOSMaxGRESPerUser"), "QOSMaxGRESPerUser"),
            (placed(dependency="afterok:1(unfulfilled)"), "holds it back"),
            (placed(restarts=1), "requeued"),
            (placed(wanted_nodes="n7"), "changed"),
        ],
    )
    def test_what_will_not_start_is_taken_back_at_once(self, now: Job, reason: str) -> None:
        placements = Placements(bound_s=30)
        placements.sent(placed(), NOW)
        ((_, why),) = placements.overdue([now], {"n0": node()}, NOW + 1)
        assert reason in why

    def test_a_node_out_of_service_gives_its_placements_back(self) -> None:
        placements = Placements(bound_s=30)
        placements.sent(placed(), NOW)
        drained = node(states=frozenset({"idle", "drain"}))
        assert placements.overdue([placed()], {"n0": drained}, NOW + 1)
        assert placements.overdue([placed()], {}, NOW + 1)

    def test_a_node_that_failed_a_job_is_avoided_and_two_are_enough(self) -> None:
        placements = Placements(bound_s=30)
        placements.failed(placed(), NOW)
        assert placements.avoid(["n0", "n1", "n2"], NOW + 1) == {"5": frozenset({"n0"})}
        other = placed(tag=f"{TAG};g=n1:1", wanted_nodes="n1")
        placements.failed(other, NOW)
        assert placements.avoid(["n0", "n1", "n2"], NOW + 1) == {"5": frozenset({"n0", "n1", "n2"})}
        assert placements.avoid(["n0"], NOW + 10_000) == {}

    def test_jobs_that_are_gone_are_forgotten(self) -> None:
        placements = Placements(bound_s=30)
        placements.failed(placed(), NOW)
        placements.overdue([], {}, NOW)
        assert placements.avoid(["n0"], NOW + 1) == {}


class TestLedger:
    def pair(self) -> list[Job]:
        return [
            running("1", "n0", "gres/shard:v100_0:1", tag=TAG, start_s=NOW - 100),
            running("2", "n0", "gres/shard:v100_0:1", tag=f"GS1:c=0;t={TOKEN_B};o=gpu:1", start_s=NOW - 10),
        ]

    def test_what_a_neighbour_costs_adds_up_over_guests(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        turn = ledger.turn(pairs_now(cards, Half(), NOW), jobs, NOW)
        assert [(pair.resident.key, pair.guest.key) for pair in turn.begun] == [("1", "2")]
        assert ledger.sharing()[1].lost_s == pytest.approx(5.0), "ten seconds at half speed"
        assert ledger.sharing()[2].joined
        assert not ledger.sharing()[1].joined
        turn = ledger.turn(pairs_now(cards, Half(), NOW + 20), jobs, NOW + 20)
        assert turn.begun == ()
        assert ledger.sharing()[1].lost_s == pytest.approx(15.0)
        turn = ledger.turn({}, jobs[:1], NOW + 30)
        assert len(turn.ended) == 1
        assert ledger.sharing()[1].lost_s == pytest.approx(15.0), "what a past guest used is gone for good"
        assert 2 not in ledger.sharing()

    def test_a_successor_is_no_guest_whatever_the_store_remembers(self) -> None:
        ledger, (first, second) = Ledger(), self.pair()
        jobs = [first, replace(second, tag=parse_tag(f"{second.admin_comment};h=1"))]
        ledger.recall([Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 100, None, 0.8, 0.5)], NOW)
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        ledger.turn(pairs_now(cards, Half(), NOW), jobs, NOW)
        assert not ledger.sharing()[2].joined

    def test_measured_rates_take_the_place_of_predicted_ones(self) -> None:
        ledger, jobs = Ledger(), self.pair()
        cards = occupancy([node(used="shard:v100_0:2(2/2)")], jobs)
        (pair,) = ledger.turn(pairs_now(cards, Half(), NOW), jobs, NOW).begun
        ledger.measured(pair.key, 1.0, None)
        ledger.turn(pairs_now(cards, Half(), NOW + 100), jobs, NOW + 100)
        assert ledger.sharing()[1].lost_s == pytest.approx(5.0)
        assert ledger.sharing()[2].lost_s == pytest.approx(55.0)

    def test_a_new_helper_takes_up_what_the_store_remembers(self) -> None:
        ledger = Ledger()
        ledger.recall([Span(1, 2, TOKEN_A, TOKEN_B, "n0", 0, "V100", NOW - 100, None, 0.8, 0.5)], NOW)
        assert ledger.sharing()[1].lost_s == pytest.approx(20.0)
        assert ledger.sharing()[2].joined


@pytest.mark.parametrize(("ended_s", "free"), [(NOW - 2, True), (NOW - 40, False), (None, False)])
def test_a_card_whose_job_has_ended_is_free_unless_its_epilog_hangs(ended_s: int | None, free: bool) -> None:
    ending = running("1", "n0", "gres/gpu:1", state="COMPLETING", end_s=ended_s, cpus=60)
    look = node(used="gpu:v100_0:1(IDX:0)", cpus_alloc=64)
    view = observe([ending], [look], [], parse_config("Partitions=gpu\nLeaseSeconds=30"), Facts(), NOW)
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
    def test_only_an_exact_comment_names_a_token(self) -> None:
        assert asked_token(f"gpushare:{TOKEN_A}") == TOKEN_A
        assert asked_token(f"gpushare:{TOKEN_A},max=10") == TOKEN_A
        assert asked_token(f"gpushare:{TOKEN_A} and more") is None
        assert asked_token("gpushare:gs-short") is None

    def test_a_job_that_the_hook_missed_is_tagged_and_nothing_else(self) -> None:
        missed = job("7", comment=f"gpushare:{TOKEN_A}")
        ((_, change),) = adoptions([missed], ["gpu"], 2, lambda token, uid: None)
        assert change.fields == {"AdminComment": f"GS1:probe;t={TOKEN_A}"}
        ((_, change),) = adoptions([missed], ["gpu"], 2, lambda token, uid: 1)
        assert change.fields == {"AdminComment": f"GS1:c=1;t={TOKEN_A}"}

    def test_several_gpus_or_another_partition_are_not_ours(self) -> None:
        comment = f"gpushare:{TOKEN_A}"
        others = [job(comment=comment, per_node="gres/gpu:2"), job(comment=comment, partitions=("debug",)), job()]
        assert adoptions(others, ["gpu"], 2, lambda token, uid: None) == []


def test_a_second_helper_is_told_who_runs(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(GpushareError, match="another helper runs"), Lock(tmp_path):
        pass
    with Lock(tmp_path):
        pass


def test_news_ends_the_wait_and_a_signal_too(tmp_path: Path) -> None:
    os.utime(tmp_path, (0, 0))  # some kernels' file times are no finer than some milliseconds
    nudge = Nudge([tmp_path], least_s=0.0)
    (tmp_path / "record").touch()
    assert nudge.wait(60, 0, lambda: False) == "news"
    nudge.mark()
    assert nudge.wait(60, 0, lambda: True) == "signal"
    assert nudge.wait(0.01, 0, lambda: False) == "tick"


def test_log_lines_stay_one_line_whatever_is_in_them() -> None:
    assert log.line("place", job="14", why='a "quote"\nand more', none=None) == (
        'event=place job=14 why="a \\"quote\\" and more"'
    )


@pytest.mark.parametrize(
    ("scatter", "expected_s"),
    [
        pytest.param(None, 400.0, id="a single run is all there is"),
        pytest.param(0.05, 404.0, id="runs that hardly differ"),
        pytest.param(0.5, 600.0, id="as uncertain as limits: halfway to half of the limit, in logarithms"),
        pytest.param(5.0, 893.0, id="runs that differ wildly: half of the limit"),
    ],
)
def test_a_tokens_history_counts_as_far_as_its_runs_agree(scatter: float | None, expected_s: float) -> None:
    got = expectation(job("1", limit_s=1800), Workload(duration_s=400.0, duration_scatter=scatter))
    assert got == (pytest.approx(expected_s, abs=1.0), DurationSource.HISTORY)
    assert expectation(job("1", limit_s=1800), Workload()) == (1800.0, DurationSource.LIMIT)
