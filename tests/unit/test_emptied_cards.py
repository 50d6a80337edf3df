"""Cards that have just become empty: what an answer knows, what a tick leaves to it, and who got the card."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from world import TOKEN_A, TOKEN_B, FakeSlurm, job, node, running

from slurm_gpushare.helper import act
from slurm_gpushare.helper.hold import Answerer, Board, EndedJob
from slurm_gpushare.helper.loop import at_once
from slurm_gpushare.helper.occupancy import CardShare, CardUse, GpuAddress, placed_card
from slurm_gpushare.helper.placements import CardHandovers
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.knowledge.kb import default_kb
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.slurm.nodes import completing_stops_everybody
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.store import Store

TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"
CARD = GpuAddress("n0", 0)
KNOWLEDGE = default_kb().knowledge()


def placed(key: str = "7", **changes: Any) -> Job:
    values: dict[str, Any] = {"tag": f"{TAG};g=n0:0", "per_node": "gres/shard:v100_0:1", "wanted_nodes": "n0"}
    return job(key, **values | changes)


class TestContest:
    @pytest.fixture
    def handovers(self) -> CardHandovers:
        handovers = CardHandovers()
        handovers.given("7", CARD)
        return handovers

    def test_a_card_is_won_when_the_job_runs_there(self, handovers: CardHandovers) -> None:
        started = running("7", "n0", "gres/shard:v100_0:1", tag=f"{TAG};g=n0:0")
        handovers.settle({"7": placed()}, {CARD: CardUse(2)}, time.monotonic())
        assert handovers.drain() == {}
        handovers.settle({"7": started}, {}, time.monotonic())
        assert handovers.drain() == {"cards_won": 1}

    def test_a_card_is_won_by_a_job_that_ran_between_two_ticks(self, handovers: CardHandovers) -> None:
        handovers.ended("7")
        handovers.ended("8")
        assert handovers.drain() == {"cards_won": 1}

    def test_a_card_is_lost_when_somebody_else_runs_there(self, handovers: CardHandovers) -> None:
        other = CardShare(running("9", "n0", "gres/gpu:v100_0:1"), 2, whole=True)
        handovers.settle({"7": placed()}, {CARD: CardUse(2, [other])}, time.monotonic())
        assert handovers.drain() == {"cards_lost": 1}

    def test_what_a_tick_read_before_the_answer_says_nothing(self, handovers: CardHandovers) -> None:
        handovers.settle({"7": job("7", tag=TAG)}, {CARD: CardUse(2)}, time.monotonic() - 10)
        assert handovers.drain() == {}

    def test_a_cancelled_job_neither_wins_nor_loses(self, handovers: CardHandovers) -> None:
        handovers.settle({}, {CARD: CardUse(2)}, time.monotonic())
        handovers.ended("7")
        assert handovers.drain() == {}


class Scene:
    """A node with two cards, both busy, and jobs that wait."""

    def __init__(self, directory: Path, waiting: Sequence[Job], policy: str | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.config: Config = parse_config(
            f"Partitions=gpu\nGpusPerNode=2\nStoreUrl=sqlite:///{directory}/store.sqlite\nSpoolDir={directory}\n"
            f"StateDir={directory}\n"
        )
        now = int(time.time())
        busy = [
            running("1", "n0", "gres/gpu:v100_0:1", start_s=now - 50),
            running("2", "n0", "gres/gpu:v100_1:1", start_s=now - 50),
        ]
        used = "gpu:v100_0:1(IDX:0),gpu:v100_1:1(IDX:1),shard:v100_0:0(0/2,0/2),shard:v100_1:0(0/2,0/2)"
        self.slurm = FakeSlurm([*busy, *waiting], [node(used=used)], comment=None)
        self.store = Store.create(self.config.store_url)
        enter_profiles(self.store, [KnownProfile(t, 1000, "V100", 2000, 16384, 1, 100) for t in (TOKEN_A, TOKEN_B)])
        self.helper = Helper(self.config, self.slurm, self.store, KNOWLEDGE, policy=policy)
        self.helper.tick()
        self.answerer = Answerer(self.helper, self.slurm, self.config)
        at_once(self.answerer.publish())

    def end(self, key: str) -> None:
        self.slurm.written.clear()
        at_once(self.answerer.answer([EndedJob(int(key), ("n0",))], time.monotonic()))

    def answers(self) -> str:
        return (self.config.spool_dir / "hold" / "answers" / "n0").read_text().split("\n")[0]


def waits(key: str, priority: int, **changes: Any) -> Job:
    return job(key, **{"tag": TAG, "priority": priority, "eligible_s": int(time.time()) - 10} | changes)


class TestAnswer:
    def test_the_head_of_the_queue_gets_the_card_and_the_node_is_told(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("8", 50), waits("7", 100)])
        assert scene.helper.state.somebody_waits
        scene.end("1")
        assert scene.slurm.written[0] == ("update", "7")
        assert placed_card(scene.slurm.queue["7"]) == CARD
        assert scene.answers() == "1"
        assert scene.helper.state.handovers.drain()["holds"] == 1

    def test_a_plain_job_that_ranks_higher_gets_it_from_slurm(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("8", 50), waits("7", 100, tag="")])
        scene.end("1")
        assert scene.slurm.written == []
        assert scene.answers() == "1"

    def test_a_head_that_slurm_started_elsewhere_meanwhile_makes_room_for_the_next(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("8", 50), waits("7", 100)])
        scene.slurm.started["7"] = running("7", "n5", "gres/gpu:1", tag=TAG)
        scene.end("1")
        assert scene.slurm.written == [("update", "8")]
        assert placed_card(scene.slurm.queue["8"]) == CARD

    def test_a_card_that_slurm_was_quicker_to_give_away_counts_as_lost(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("7", 100)])
        scene.slurm.started["7"] = running("7", "n0", "gres/gpu:v100_0:1", tag=TAG)
        scene.end("1")
        assert scene.slurm.written == []
        assert scene.helper.state.handovers.drain()["cards_lost"] == 1

    def test_a_node_that_drains_gets_nobody(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("7", 100)])
        scene.slurm.all_nodes["n0"] = node(states=frozenset({"mixed", "drain"}))
        scene.end("1")
        assert scene.slurm.written == []
        assert scene.answers() == "1"

    def test_a_job_that_started_since_the_last_tick_is_asked_about(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("7", 100)])
        scene.slurm.started["30"] = running("30", "n0", "gres/gpu:v100_0:1", state="COMPLETING")
        scene.slurm.queue.pop("1")
        at_once(scene.answerer.answer([EndedJob(1, ("n0",)), EndedJob(30, ("n0",))], time.monotonic()))
        assert scene.slurm.written == [("update", "7")]

    def test_the_node_is_told_even_if_slurm_does_not_answer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scene = Scene(tmp_path, [waits("7", 100)])
        monkeypatch.setattr(scene.slurm, "nodes", Mock(side_effect=ControllerDown("sinfo: no answer")))
        with pytest.raises(ControllerDown):
            scene.end("1")
        assert scene.answers() == "1"

    def test_a_tick_leaves_alone_what_an_answer_has_placed_since_it_asked(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("7", 100), waits("8", 50)])
        asked_s, jobs = time.monotonic(), scene.slurm.jobs()
        gone = running("1", "n0", "gres/gpu:v100_0:1", state="COMPLETING", end_s=int(time.time()))
        ended = [gone if item.key == "1" else item for item in jobs]
        scene.end("1")
        assert placed_card(scene.slurm.queue["7"]) == CARD
        scene.slurm.written.clear()
        report = scene.helper.tick(ended, asked_s)
        assert scene.slurm.written == []
        assert report.outcomes.get("place:overtaken") == 1

    def test_what_was_heard_while_a_tick_read_the_queue_is_not_forgotten(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path, [waits("7", 100), waits("8", 50)])
        asked_s, jobs = time.monotonic(), scene.slurm.jobs()
        scene.end("1")
        scene.helper.tick(jobs, asked_s)
        scene.end("2")
        assert scene.slurm.written == [("update", "8")], "7 is still known to go to the other card"

    @pytest.mark.parametrize("quick", [True, False])
    def test_a_half_that_was_left_is_given_away_at_once_where_answers_are_quick(
        self, tmp_path: Path, quick: bool
    ) -> None:
        scene = Scene(tmp_path, [waits("7", 100), waits("8", 90), waits("9", 80)], policy="fcfs")
        scene.end("1")
        for key in ("7", "8"):
            started = running(key, "n0", "gres/shard:v100_0:1", tag=f"{TAG};g=n0:0", start_s=int(time.time()))
            scene.slurm.queue[key] = started
        used = "gpu:v100_1:1(IDX:1),shard:v100_0:2(2/2,0/2),shard:v100_1:0(0/2,0/2)"
        scene.slurm.all_nodes["n0"] = node(used=used)
        scene.helper.tick([item for key, item in scene.slurm.queue.items() if key != "1"])
        assert placed_card(scene.slurm.queue["9"]) is None
        if not quick:
            scene.answerer._took_s = 1.0
        scene.end("7")
        assert scene.slurm.written == ([("update", "9")] if quick else [])


def test_the_board_has_a_beat_also_while_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then, not each time: whoever looks at the board from a node sees that the helper lives."""
    scene, now_s = Scene(tmp_path, []), time.time()
    beats = []
    for after_s in (0, 2, 28, 31, 33, 62):
        monkeypatch.setattr(time, "time", lambda after_s=after_s: now_s + after_s)
        at_once(scene.answerer.publish())
        beat, until, _ = (scene.config.spool_dir / "hold" / "helper").read_text().split()
        beats.append(round(int(beat) / 1000 - now_s))
        assert until == "0", "no epilog holds for it"
    assert beats == [0, 0, 0, 31, 31, 62]


def test_complete_wait_stops_everybody_unless_told_otherwise() -> None:
    assert completing_stops_everybody({"CompleteWait": "30 sec"})
    assert not completing_stops_everybody({"CompleteWait": "0 sec"})
    assert not completing_stops_everybody({})
    careful = {"CompleteWait": "30 sec", "SchedulerParameters": "defer,reduce_completing_frag"}
    assert not completing_stops_everybody(careful)


def test_a_flood_of_leases_does_not_hold_a_tick_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is ended by a change of its own; what does not fit into a second ends by itself."""
    later_s = int(time.time()) + 200
    jobs = [waits(str(key), 50, tag=f"{TAG};l=1", eligible_s=later_s) for key in range(10, 20)]
    ended = [key for _, key in Scene(tmp_path / "all", jobs).slurm.written if int(key) >= 10]
    assert len(ended) == 10
    monkeypatch.setattr(act, "MANY_S", -1.0)
    assert Scene(tmp_path / "none", jobs).slurm.written == []


def test_a_board_that_somebody_removed_and_made_again_is_written_anew(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.show(1, 2, ["n0"], [])
    for again in (lambda: None, lambda: Board(tmp_path).open()):
        shutil.rmtree(board.directory)
        again()
        board.answer("n0", [7])
        assert (board.directory / "answers" / "n0").read_text().split()[-1] == "7"
        board.show(3, 4, ["n0", "n1"], [])
        assert (board.directory / "answers" / "n1").exists()
