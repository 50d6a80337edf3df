"""Cards under an MPS server as the sampler sees them, and the stand-in of the server's control program itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_kit import Node
from gpushare_lab.testbed.processes import wait_until

from slurm_gpushare.node.mps import MpsError, end_clients, in_fault

CARD = """
import json, sys, time
from slurm_gpushare.node.load_generator import Load
from slurm_gpushare.node.nvml import open_cards
import os
client = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
with Load(client, duty=0.5) as load:
    card, seen = open_cards([1])[1], {}
    load.begin(300)
    until = time.monotonic() + 200  # a busy machine runs few steps, and the card tells of none
    while time.monotonic() < until:
        sample = card.read(everything=False)
        figure = sample.processes and sample.processes.get(load.pid)
        seen = {"mps": card.mps, "blind": card.blind, "one_process": card.one_process,
                "figure": bool(figure and figure.sm_pct), "card": bool(sample.util_pct)}
        if seen["card"] and (seen["figure"] or sys.argv[1:] == ["blind"]):
            break
        time.sleep(0.1)
print(json.dumps(seen))
"""


class Daemon:
    """A control daemon of the stand-in for card 1."""

    def __init__(self, node: Node, directory: Path, *options: str) -> None:
        self.node, self.root = node, directory
        self.environ = {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_VISIBLE_DEVICES": "1"}
        self.start(*options)

    def start(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self._run("-d", *options)

    def ask(self, command: str) -> subprocess.CompletedProcess[str]:
        return self._run(given=f"{command}\n")

    def _run(self, *options: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nvidia-cuda-mps-control", *options], env={**self.node.environ, **self.environ}, input=given,
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip

    def client(self, uid: int | None = None) -> subprocess.Popen[bytes]:
        """A process that waits to be served, as CUDA's first call does, and then does nothing."""
        code = (
            'd="$CUDA_MPS_PIPE_DIRECTORY"; : >"$d/clients/$$"; until [ -e "$d/served/$$" ]; do sleep 0.02; done;'
            " echo served; sleep 60"
        )
        return subprocess.Popen(
            ["/bin/sh", "-c", code], env={**self.node.environ, **self.environ}, stdout=subprocess.PIPE, user=uid
        )


@pytest.fixture
def daemon(node: Node, short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    directory = short_tmp / f"mps-{abs(hash(request.node.name)) % 10**8}"
    directory.mkdir(mode=0o755)
    made = Daemon(node, directory, *getattr(request, "param", ()))
    yield made
    made.ask("quit")


def seen(daemon: Daemon, *words: str, **environ: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(daemon.node.python(CARD, *words, **daemon.environ, **environ))
    return answer


def test_a_server_on_a_card_is_noticed_with_whom_it_serves(daemon: Daemon) -> None:
    """Root's own client: its server is root's, which serves everybody."""
    assert seen(daemon) == {
        "mps": "all-users", "blind": False, "one_process": False, "figure": True, "card": True
    }  # fmt: skip


def test_a_server_that_takes_all_figures_leaves_none_of_its_clients(daemon: Daemon) -> None:
    told = seen(daemon, "blind", GPUSHARE_EMU_MPS_BLIND="1")
    assert told == {"mps": "all-users", "blind": True, "one_process": False, "figure": False, "card": True}


def test_without_a_server_nothing_is_said_of_mps(node: Node) -> None:
    told = json.loads(node.python(CARD.replace('"CUDA_VISIBLE_DEVICES": "0"', '"CUDA_VISIBLE_DEVICES": "1"')))
    assert (told["mps"], told["blind"], told["figure"]) == (None, False, True)


def test_the_stand_in_serves_one_user_at_a_time(daemon: Daemon) -> None:
    first = daemon.client(uid=65534)
    assert first.stdout is not None
    assert first.stdout.readline() == b"served\n"
    (server,) = daemon.ask("get_server_list").stdout.split()
    assert os.stat(f"/proc/{server}").st_uid == 65534
    second = daemon.client()
    waits = daemon.root / "clients" / str(second.pid)
    wait_until(waits.exists, 10)
    assert daemon.ask(f"get_client_list {server}").stdout.split() == [str(first.pid)]
    assert not (daemon.root / "served" / str(second.pid)).exists(), "without a word"
    daemon.ask(f"terminate_client {server} {first.pid}")
    assert second.stdout is not None
    assert second.stdout.readline() == b"served\n"
    for client in (first, second):
        client.kill()
        client.wait()


@pytest.mark.parametrize("daemon", [("-multiuser-server",)], indirect=True)
def test_the_stand_in_serves_two_users_at_once_where_it_was_started_for_them(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", daemon.node.environ["PATH"])
    clients = [daemon.client(uid=65534), daemon.client()]
    assert all(client.stdout is not None and client.stdout.readline() == b"served\n" for client in clients)
    (server,) = daemon.ask("get_server_list").stdout.split()
    assert daemon.ask(f"get_server_status {server}").stdout == "ACTIVE\n"
    assert not in_fault(daemon.root)
    clients[0].kill()  # with work on the card, and nobody had told the server
    clients[0].wait()
    wait_until(lambda: daemon.ask(f"get_server_status {server}").stdout == "FAULT\n", 10)
    assert in_fault(daemon.root)
    with pytest.raises(MpsError, match="Cannot find MPS control daemon process"):
        in_fault(daemon.root / "nowhere")
    third = daemon.client()
    wait_until((daemon.root / "clients" / str(third.pid)).exists, 10)
    assert not (daemon.root / "served" / str(third.pid)).exists(), "a server in FAULT takes nobody"
    clients[1].kill()
    clients[1].wait()
    assert third.stdout is not None
    assert third.stdout.readline() == b"served\n", "a new server, once all have left"
    third.kill()
    third.wait()


@pytest.mark.parametrize("daemon", [("-multiuser-server",)], indirect=True)
def test_a_client_whose_work_the_server_has_ended_can_be_killed_without_harm(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", daemon.node.environ["PATH"])
    victim, neighbour = daemon.client(), daemon.client(uid=65534)
    assert all(it.stdout is not None and it.stdout.readline() == b"served\n" for it in (victim, neighbour))
    assert end_clients(daemon.root, lambda pid: pid == victim.pid) == 1
    (server,) = daemon.ask("get_server_list").stdout.split()
    assert daemon.ask(f"get_client_list {server}").stdout.split() == [str(neighbour.pid)]
    victim.kill()
    victim.wait()
    assert daemon.ask(f"get_server_status {server}").stdout == "ACTIVE\n"
    assert end_clients(daemon.root, lambda pid: pid == victim.pid) == 0
    neighbour.kill()
    neighbour.wait()


def test_the_stand_in_refuses_what_it_refuses(daemon: Daemon) -> None:
    again = daemon.start()
    assert (again.returncode, again.stderr) == (1, "An instance of this daemon is already running\n")
    assert daemon.ask("dance").stdout == "Invalid command: dance\n"
    daemon.ask("quit")
    wait_until(lambda: not (daemon.root / "control").exists(), 10)
    assert daemon.ask("get_server_list").stderr == "Cannot find MPS control daemon process\n"
