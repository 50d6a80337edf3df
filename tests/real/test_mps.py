"""MPS managed by prolog, epilog and the unit, with stand-ins of NVIDIA's programs, on a real Slurm with two users."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
from gpushare_lab.emulator.card import ComputeMode, EmulatedCard
from gpushare_lab.emulator.mps_control import PID_FILE
from gpushare_lab.emulator.node import card_path
from gpushare_lab.emulator.node_programs import install_programs
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import configure, node_dir, start, until

from slurm_gpushare.protocol.files import read_or_empty
from slurm_gpushare.protocol.stop_orders import StopOrder, order_file, write_order

TOKEN = "--comment=gpushare:gs-{0}{0}{0}"
CLIENT = """
d="$CUDA_MPS_PIPE_DIRECTORY"; : >"$d/clients/$$"
echo "pipe=$d cards=$CUDA_VISIBLE_DEVICES limit=$CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
i=0; until [ -e "$d/served/$$" ]; do sleep 0.1; i=$((i + 1)); [ $i -lt 600 ] || exit 1; done
echo served; until [ -e go ]; do sleep 0.1; done; rm -f "$d/clients/$$"
"""
"""A job that is a client of MPS, as CUDA's first call makes it: it waits to be served, without a word."""


def output(testbed: Testbed, job: int, user: str = "games") -> str:
    """What a job has said so far."""
    return read_or_empty(testbed.layout.home / user / f"{job}.out")


class Node:
    """The node gpu0 and its first card."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed
        self.pipe = testbed.layout.gpushare / "state" / "mps" / "0"

    @property
    def mode(self) -> ComputeMode:
        with EmulatedCard(card_path(self.testbed.layout.emu, "gpu0", 0)) as card:
            return ComputeMode(card.info.compute_mode)

    @property
    def served(self) -> bool:
        return (self.pipe / PID_FILE).exists()

    def ask(self, command: str) -> str:
        environ = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "PATH": f"{self.testbed.layout.bin}:/usr/bin:/bin"}
        done = subprocess.run(
            ["nvidia-cuda-mps-control"], env=environ, input=f"{command}\n", capture_output=True, text=True, timeout=30
        )
        return done.stdout.strip()

    def go(self, user: str) -> None:
        (self.testbed.layout.home / user / "go").touch()


@pytest.fixture
def node(testbed: Testbed, raw_shards: None) -> Iterator[Node]:
    install_programs(testbed.layout.bin)
    for user in ("games", "news"):
        (testbed.layout.home / user / "go").unlink(missing_ok=True)
    made = Node(testbed)
    yield made
    if made.served:
        made.ask("quit")


def test_jobs_that_share_are_clients_of_one_daemon_which_ends_with_the_last_of_them(
    testbed: Testbed, node: Node
) -> None:
    configure(testbed, Mps="all")
    first = start(testbed, CLIENT, TOKEN.format("firstt"), env={"GPUSHARE_MEMORY": "8234"})  # as the hook's word
    until(lambda: "served" in output(testbed, first))
    assert f"pipe={node.pipe} cards=0 limit=0=8234M" in output(testbed, first)
    assert node.mode is ComputeMode.EXCLUSIVE_PROCESS
    assert node.ask("get_default_device_pinned_mem_limit 0") == f"{16384 * 95 // 100}M"
    second = start(testbed, CLIENT, TOKEN.format("second"), user="news")
    until(lambda: "served" in output(testbed, second, "news"))
    assert len(node.ask(f"get_client_list {node.ask('get_server_list')}").split()) == 2, "of two users"
    node.go("games")
    wait_for(testbed, first, ["COMPLETED"])
    assert node.served
    node.go("news")
    wait_for(testbed, second, ["COMPLETED"])
    assert not node.served
    assert node.mode is ComputeMode.DEFAULT
    one = "python -m gpushare_lab.job.workload --gpu-util 10 --mem-access 5 --mem-mib 500 --work-s 1"
    other = start(testbed, f"for i in 1 2 3 4; do {one} & done; wait", "--gres=gpu:1")
    wait_for(testbed, other, ["COMPLETED"])
    assert "busy or unavailable" not in output(testbed, other), "four processes on a card in DEFAULT"


def test_a_server_in_fault_lets_nobody_join(testbed: Testbed, node: Node) -> None:
    configure(testbed, Mps="all", InterimSeconds="1")
    jobs = [start(testbed, CLIENT, TOKEN.format(name)) for name in ("firstt", "second")]
    until(lambda: all("served" in output(testbed, job) for job in jobs))
    server = node.ask("get_server_list")
    victim = node.ask(f"get_client_list {server}").split()[0]
    subprocess.run(["kill", "-KILL", victim], check=True)  # with work on the card, and nobody told the server
    until(lambda: node.ask(f"get_server_status {server}") == "FAULT")
    log = node_dir(testbed) / "sampler.log"
    until(lambda: "is in FAULT" in log.read_text())
    node.go("games")
    wait_for(testbed, jobs, ["COMPLETED", "FAILED", "CANCELLED"])
    assert not node.served, "it is started anew for the next ones"


def test_a_client_that_is_to_be_killed_does_not_take_its_neighbour_along(testbed: Testbed, node: Node) -> None:
    configure(testbed, Mps="all")
    jobs = [start(testbed, CLIENT, TOKEN.format(name)) for name in ("firstt", "second")]
    until(lambda: all("served" in output(testbed, job) for job in jobs))
    server = node.ask("get_server_list")
    clients = node.ask(f"get_client_list {server}").split()
    number, order = 1, order_file(testbed.layout.gpushare / "spool", "gpu0")
    log = node_dir(testbed) / "sampler.log"
    while "has ended 1 clients" not in log.read_text():  # as the helper does once a job has not ended in time
        write_order(order, StopOrder(number := number + 1, dying=frozenset(jobs[:1])))
        time.sleep(0.2)
    (left,) = node.ask(f"get_client_list {server}").split()
    (victim,) = set(clients) - {left}
    subprocess.run(["kill", "-KILL", victim], check=True)
    wait_for(testbed, jobs[0], ["FAILED", "CANCELLED"])
    assert (node.ask(f"get_server_status {server}"), node.ask(f"get_client_list {server}")) == ("ACTIVE", left)
    order.unlink()
    node.go("games")
    wait_for(testbed, jobs[1], ["COMPLETED"])


def test_where_mps_is_off_and_for_jobs_without_a_token_nothing_is_started(testbed: Testbed, node: Node) -> None:
    quiet = start(testbed, "echo pipe=$CUDA_MPS_PIPE_DIRECTORY", TOKEN.format("firstt"))
    wait_for(testbed, quiet, ["COMPLETED"])
    configure(testbed, Mps="user")
    other = start(testbed, "echo pipe=$CUDA_MPS_PIPE_DIRECTORY")
    wait_for(testbed, other, ["COMPLETED"])
    assert [output(testbed, job).strip() for job in (quiet, other)] == ["pipe=", "pipe="]
    assert not node.served
