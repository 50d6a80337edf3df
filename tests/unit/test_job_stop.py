"""A job stands still by the helper's order, all of it, and goes on by itself when the order is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slurm_gpushare.helper.promises import tell_nodes
from slurm_gpushare.node.delivery import OrderRelay
from slurm_gpushare.node.processes import JobStop, stands_still
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.protocol.stop_orders import (
    EXPIRY_S,
    BelievedOrder,
    StopOrder,
    order_file,
    parse_order,
    read_order,
    write_order,
)
from slurm_gpushare.store import Store

# A parent, a child, and a worker in a session of its own, as torchrun makes them.
TREE = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time\\nwhile True: time.sleep(0.01)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("up", flush=True)
while True: time.sleep(0.01)
"""


def within(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class Tree:
    """A job's processes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def pids(self) -> set[int]:
        parent = psutil.Process(self.process.pid)
        return {parent.pid, *(child.pid for child in parent.children(recursive=True))}

    def stand(self) -> bool:
        return all(stands_still(pid) for pid in self.pids())

    def run(self) -> bool:
        return not any(stands_still(pid) for pid in self.pids())


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    for pid in tree.pids():
        os.kill(pid, signal.SIGKILL)
    tree.process.wait()


@pytest.fixture
def stop(tree: Tree) -> Iterator[JobStop]:
    stop = JobStop(tree.pids)
    yield stop
    stop.close()


def test_all_processes_stand_still_and_go_on(tree: Tree, stop: JobStop) -> None:
    assert len(tree.pids()) == 3
    stop.look(True, 1)
    assert within(tree.stand)
    stop.look(False, 1)
    assert within(tree.run)


def test_who_is_new_is_stopped_at_the_next_look(tree: Tree) -> None:
    known: set[int] = {tree.process.pid}
    stop = JobStop(lambda: known)
    stop.look(True, 1)
    known |= tree.pids()
    stop.look(True, 1)
    assert within(tree.stand)
    stop.close()
    assert within(tree.run)


def test_the_time_that_it_stood_is_known_exactly(tree: Tree) -> None:
    now = 0.0
    stop = JobStop(tree.pids, lambda: now)
    stop.look(True, 1)
    for now in (2.5, 5.0, 7.0):
        stop.look(now < 7.0, 1)
    now = 100.0
    stop.look(False, 1)
    assert (stop.stopped_s, stop.woken) == (7.0, 0)
    stop.close()


def test_who_lets_its_own_job_go_on_earns_no_time_and_is_stopped_again(tree: Tree) -> None:
    now, renewals = 0.0, 1
    stop = JobStop(tree.pids, lambda: now)
    stop.look(True, renewals)
    assert within(tree.stand)
    now = 2.0
    stop.look(True, renewals)
    os.kill(tree.process.pid, signal.SIGCONT)
    assert within(lambda: not stands_still(tree.process.pid))
    now = 4.0
    stop.look(True, renewals)
    assert (stop.woken, stop.stopped_s) == (1, 2.0)
    now, renewals = 5.0, renewals + 1
    stop.look(True, renewals)
    assert within(tree.run), "the order may be older than the CONT: it may be Slurm's, before TERM"
    now, renewals = 9.0, renewals + 1
    stop.look(True, renewals)
    assert within(tree.stand), "the helper has seen it run since"
    now = 10.0
    stop.look(False, renewals)
    assert (stop.woken, stop.stopped_s) == (1, 3.0)
    stop.close()


@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_a_job_that_begins_to_end_right_after_its_stop_is_not_stopped_again(tree: Tree, ending: signal.Signals) -> None:
    """Slurm lets the first process go on and ends it, and on 22.05 does not reach workers in sessions of their own."""
    stop = JobStop(tree.pids)
    stop.look(True, 1)
    others = tree.pids() - {tree.process.pid}
    os.kill(tree.process.pid, ending)
    assert within(lambda: not stands_still(tree.process.pid))
    stop.look(True, 1)
    assert within(lambda: not any(map(stands_still, others)))
    stop.close()
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_who_used_the_gpu_in_a_stop_did_not_stand_still(tree: Tree) -> None:
    """It let itself go on between two looks."""
    now = 0.0
    stop = JobStop(tree.pids, lambda: now)
    stop.look(True, 1)
    now = 2.0
    stop.look(True, 1, worked=True)
    assert stop.woken == 0, "kernels that were launched before run to their end"
    now = 5.0
    stop.look(True, 1, worked=True)
    assert (stop.woken, stop.stopped_s) == (1, 2.0)
    stop.close()


def test_a_process_that_its_owner_stopped_stays_so(tree: Tree, stop: JobStop) -> None:
    worker = max(tree.pids())
    os.kill(worker, signal.SIGSTOP)
    assert within(lambda: stands_still(worker))
    stop.look(True, 1)
    stop.look(False, 1)
    assert within(lambda: not stands_still(tree.process.pid))
    assert stands_still(worker)


def test_a_sampler_that_dies_lets_its_job_go_on(tree: Tree) -> None:
    pids = ",".join(map(str, tree.pids()))
    program = (
        "import time\nfrom slurm_gpushare.node.processes import JobStop\n"
        f"JobStop(lambda: {{{pids}}}).look(True, 1)\nprint('held', flush=True)\ntime.sleep(600)\n"
    )
    sampler = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert sampler.stdout is not None
    sampler.stdout.readline()
    assert within(tree.stand)
    sampler.kill()
    sampler.wait()
    assert within(tree.run)


def test_an_order_is_believed_while_it_grows() -> None:
    now, told = 0.0, BelievedOrder(lambda: now)
    assert told.believed(StopOrder(5, frozenset({1}))).jobs == set(), "it may be of long ago"
    assert told.believed(StopOrder(6, frozenset({1}))).jobs == {1}
    now = EXPIRY_S
    assert told.believed(StopOrder(6, frozenset({1}))).jobs == {1}
    now = EXPIRY_S + 1
    assert told.believed(StopOrder(6, frozenset({1}))).jobs == set(), "nobody renews it"
    assert told.believed(StopOrder(7, frozenset({1}))).jobs == {1}
    assert told.believed(None).jobs == set(), "it is gone"
    assert told.believed(StopOrder(3, frozenset({1}))).jobs == set(), "another helper's, or a clock that was set back"
    assert told.renewals == 2
    told.forget()
    assert told.believed(StopOrder(4, frozenset({1}))).jobs == set(), "it has grown while nobody looked"


def test_the_first_order_after_none_is_believed_at_once() -> None:
    told = BelievedOrder(lambda: 0.0)
    assert told.believed(None).jobs == set()
    assert told.believed(StopOrder(5, frozenset({1}))).jobs == {1}
    assert told.believed(None).jobs == set()
    assert BelievedOrder(lambda: 100.0).believed(StopOrder(5, frozenset({1}))).jobs == set()


@pytest.mark.parametrize(
    "text", ["", "x", "5", "5 1;2", "5 1,", "-5 -", "5 -\nx", "5 99999999999", "9" * 19 + " -", "5 - 7;"]
)
def test_what_is_no_order_is_none(text: str) -> None:
    assert parse_order(text) is None


def test_an_order_comes_back_from_its_file(tmp_path: Path) -> None:
    path = order_file(tmp_path, "n7")
    for order in (StopOrder(1, frozenset({4711, 12})), StopOrder(2), StopOrder(3, frozenset({5}), frozenset({7, 8}))):
        write_order(path, order)
        assert read_order(path, str(os.geteuid())) == order


def test_an_order_that_others_could_have_written_is_none(tmp_path: Path) -> None:
    path = order_file(tmp_path, "n7")
    write_order(path, StopOrder(1, frozenset({5})))
    path.chmod(0o666)
    assert read_order(path, str(os.geteuid())) is None
    path.chmod(0o644)
    path.parent.chmod(0o777)
    assert read_order(path, str(os.geteuid())) is None
    path.parent.chmod(0o755)
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    assert read_order(path, str(os.geteuid())) is None
    path.unlink()
    assert read_order(path, str(os.geteuid())) is None
    write_order(path, StopOrder(2))
    os.chown(path, 12345, -1)
    assert read_order(path, "nobody-of-that-name") is None
    assert read_order(path, str(os.geteuid())) is None


def test_an_order_comes_through_the_database(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "gpushare.conf"
    settings.write_text(f"Partitions=gpu\nStoreUrl={store_url}\nRecordsTo=store\n")
    monkeypatch.setenv("GPUSHARE_CONF", str(settings))
    path, user = tmp_path / "node" / "stops", str(os.geteuid())
    path.parent.mkdir(0o700)
    relays = [OrderRelay("n7", path), OrderRelay("n7", path)]

    def brought(relay: OrderRelay) -> StopOrder | None:
        relay.keep(True)  # as at each look
        return read_order(path, user)

    with Store.create(store_url) as store:
        tell_nodes(load_config(settings), store, {"n7": StopOrder(3, frozenset({5})), "n8": StopOrder(3)})
        for relay in relays:
            relay.keep(True)
        assert relays[1]._child is None, "one is enough for a node"
        assert within(lambda: brought(relays[0]) == StopOrder(3, frozenset({5})), 60)
        assert path.stat().st_mode & 0o077 == 0
        relays[0].close()
        relays[1]._next_s = 0.0
        relays[1].keep(True)
        tell_nodes(load_config(settings), store, {"n7": StopOrder(4)})
        assert within(lambda: brought(relays[1]) == StopOrder(4), 60), "the other sampler's has taken its place"
        child = relays[1]._child
        relays[1].keep(False)
        assert child is not None
        assert child.poll() is not None
