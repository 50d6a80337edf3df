"""The epilog's hold and the controller's wake-up: the shell scripts by themselves, without Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hanging import left_behind, stopped_file_system

from slurm_gpushare.helper.hold import Board, EndedJob, EndedJobs
from slurm_gpushare.protocol.files import resource_dir

JOB, NODE = 41, "n0"


class Node:
    """A node whose epilog is run, and the helper's notice board that it reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.here = directory / "state" / "nodes" / NODE
        (self.here / "gpus" / "0").mkdir(parents=True)
        (directory / "spool").mkdir()
        self.settings = {"EpilogHold": "0.2", "SlurmUser": str(os.getuid())}
        self.board = Board(directory / "spool")
        self.board.open()
        self.board.expect([NODE])
        self.publish()

    def publish(self, beat: int = 1, for_s: float = 60.0, without: tuple[str, ...] = ()) -> None:
        self.board.publish(beat, round(1000 * (time.time() + for_s)), without)

    def environment(self) -> dict[str, str]:
        lines = {"Partitions": "gpu", "SpoolDir": f"{self.directory}/spool", "StateDir": f"{self.directory}/state"}
        conf = self.directory / "gpushare.conf"
        conf.write_text("".join(f"{name}={value}\n" for name, value in (lines | self.settings).items()))
        return {
            "GPUSHARE_CONF": str(conf), "SLURM_JOB_ID": str(JOB), "SLURMD_NODENAME": NODE, "SLURM_JOB_GPUS": "0",
            "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_NODELIST": NODE,
        }  # fmt: skip

    def epilog(self, script: str = "epilog.sh", **environ: str) -> None:
        done = subprocess.run([resource_dir("prolog") / script], env=self.environment() | environ, timeout=30)
        assert done.returncode == 0

    def holds(self) -> list[Mapping[str, int]]:
        path = self.here / "holds"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            dict(zip(("begin", "end", "beat", "answered", "job"), map(int, line.split()), strict=True))
            for line in lines
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_card_that_becomes_empty_is_held_for_the_set_time_at_most(node: Node) -> None:
    begin_ms = 1000 * time.time()
    node.epilog()
    (hold,) = node.holds()
    assert hold["end"] - begin_ms >= 200, "what is read of the board counts as well"
    assert hold["end"] - hold["begin"] < 300
    assert (hold["job"], hold["answered"]) == (JOB, 0)


def test_the_hold_ends_when_the_helper_has_answered(node: Node) -> None:
    node.settings["EpilogHold"] = "2"
    threading.Timer(0.1, node.board.answer, (NODE, [JOB])).start()
    node.epilog()
    (hold,) = node.holds()
    assert hold["answered"] == 1
    assert hold["end"] - hold["begin"] < 2000


def test_an_answer_to_another_job_does_not_end_it(node: Node) -> None:
    node.board.answer(NODE, [JOB + 1, 4, 1])
    node.epilog()
    assert [hold["answered"] for hold in node.holds()] == [0]


@pytest.mark.parametrize(
    "environ", [{"SLURM_JOB_GPUS": ""}, {"SLURM_JOB_PARTITION": "other"}, {"SLURMD_NODENAME": "n1"}]
)
def test_other_jobs_and_nodes_without_a_card_of_ours_are_not_held(node: Node, environ: dict[str, str]) -> None:
    node.epilog(**environ)
    assert node.holds() == []


def test_a_card_on_which_somebody_stays_is_not_held(node: Node) -> None:
    (node.here / "gpus" / "0" / "40").touch()
    node.epilog()
    assert node.holds() == []


@pytest.mark.parametrize("setting", ["0", "", "nonsense", "-1", "1e3"])
def test_no_hold_unless_the_setting_is_a_time(node: Node, setting: str) -> None:
    node.settings["EpilogHold"] = setting
    node.epilog()
    assert node.holds() == []


def test_no_hold_while_nobody_waits_or_the_helper_has_not_been_heard_of_lately(node: Node) -> None:
    node.publish(for_s=-1)
    node.epilog()
    node.board.publish(1, 0)
    node.epilog()
    (node.board.directory / "helper").write_text("what is this\n")
    node.epilog()
    (node.board.directory / "helper").unlink()
    node.epilog()
    assert node.holds() == []


def test_a_node_that_drains_does_not_hold(node: Node) -> None:
    node.publish(without=("n7", NODE))
    node.epilog()
    assert node.holds() == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_board_that_others_can_write_is_not_believed(node: Node, mode: int) -> None:
    node.board.directory.chmod(mode)
    node.epilog()
    assert node.holds() == []


def test_a_board_of_another_user_is_not_believed(node: Node) -> None:
    if os.getuid():
        pytest.skip("only root can make another user's directory")
    os.chown(node.board.directory, 12345, 12345)
    node.epilog()
    assert node.holds() == []
    node.settings["SlurmUser"] = "12345"
    node.epilog()
    assert len(node.holds()) == 1


def test_a_helper_that_leaves_a_hold_unanswered_gets_another_only_after_a_sign_of_life(node: Node) -> None:
    node.epilog()
    node.epilog()
    assert len(node.holds()) == 1
    node.publish(beat=2)
    node.epilog()
    assert [hold["beat"] for hold in node.holds()] == [1, 2]


def _held_earlier(node: Node, *holds: tuple[int, int]) -> None:
    """Answered holds: how many milliseconds ago each began and ended."""
    now_ms = round(1000 * time.time())
    lines = [f"{now_ms - begin} {now_ms - end} 1 1 7\n" for begin, end in holds]
    (node.here / "holds").write_text("".join(lines))


def test_a_node_is_held_for_a_tenth_of_any_minute_at_most(node: Node) -> None:
    node.settings["EpilogHold"] = "2"
    _held_earlier(node, (50_000, 48_100), (30_000, 28_000), (10_000, 8_000))
    node.epilog()
    hold = node.holds()[-1]
    assert (hold["job"], len(node.holds())) == (JOB, 4)
    assert 100 <= hold["end"] - hold["begin"] < 2000, "5.9 s were gone"
    node.publish(beat=2)
    node.epilog()
    assert len(node.holds()) == 4


def test_holds_of_several_cards_at_once_count_once_and_those_of_an_earlier_minute_not_at_all(node: Node) -> None:
    _held_earlier(node, (99_000, 92_000), (20_000, 18_000), (19_900, 18_000), (19_800, 18_100), (19_500, 18_000))
    node.epilog()
    assert node.holds()[-1]["job"] == JOB


def test_a_file_server_that_hangs_costs_less_than_the_hold_and_one_process(node: Node) -> None:
    node.settings["EpilogHold"] = "1"
    with stopped_file_system(node.directory / "spool"):
        began = time.monotonic()
        node.epilog()
        assert time.monotonic() - began < 20, "it would be for ever"
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(lambda _: node.epilog(), range(50)))
        assert len(left_behind(node.here)) == 1
    assert node.holds() == []


@pytest.mark.parametrize("name", ["hold", "hold/helper", f"hold/answers/{NODE}"])
def test_a_pipe_in_place_of_a_file_of_the_board_keeps_nobody(node: Node, name: str) -> None:
    path = node.directory / "spool" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)
    began = time.monotonic()
    node.epilog()
    assert time.monotonic() - began < 5


class TestTheWakeUp:
    def test_the_helper_hears_of_an_ended_job_and_where_it_ran(self, node: Node) -> None:
        pipe = EndedJobs(node.directory / "state")
        node.epilog("epilog_slurmctld.sh", SLURM_JOB_NODELIST="n[0-1,7]")
        assert pipe.read() == [EndedJob(JOB, ("n0", "n1", "n7"))]
        pipe.close()

    def test_other_partitions_are_none_of_its_business(self, node: Node) -> None:
        pipe = EndedJobs(node.directory / "state")
        node.epilog("epilog_slurmctld.sh", SLURM_JOB_PARTITION="other")
        assert pipe.read() == []
        pipe.close()

    def test_nobody_waits_for_a_helper_that_is_not_there(self, node: Node) -> None:
        node.epilog("epilog_slurmctld.sh")
        EndedJobs(node.directory / "state").close()
        node.epilog("epilog_slurmctld.sh")

    def test_nobody_waits_for_a_helper_that_hangs(self, node: Node) -> None:
        pipe = EndedJobs(node.directory / "state")
        writer = os.open(node.directory / "state" / "ended", os.O_RDWR | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.close(writer)
        node.epilog("epilog_slurmctld.sh")
        pipe.close()

    def test_lines_that_are_none_are_skipped(self, node: Node) -> None:
        pipe = EndedJobs(node.directory / "state")
        with (node.directory / "state" / "ended").open("w") as writer:
            writer.write("nonsense\n12 n0\n; rm -rf\n13 n1\n14")
        assert pipe.read() == [EndedJob(12, ("n0",)), EndedJob(13, ("n1",))]
        pipe.close()
