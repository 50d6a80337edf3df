"""One helper a cluster: the lease, who may take it, and who must not change anything any more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from world import FakeSlurm

from slurm_gpushare.helper import daemon as daemon_module
from slurm_gpushare.helper import lease as lease_module
from slurm_gpushare.helper import process as process_module
from slurm_gpushare.helper.lease import (
    BELIEVED_S,
    TAKEN_AFTER_S,
    Lease,
    LeaseFile,
    NotInCharge,
    acts_here,
    in_charge,
    is_gone,
    stand_by,
    this_process,
)
from slurm_gpushare.helper.process import backfill
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.lease_row import LeaseRow

ELSEWHERE = "ctl2 7 boot.1.5"
"""A holder on another host."""


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which tests set."""
    now_s = [1000.0]
    monkeypatch.setattr(lease_module.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def place(tmp_path: Path) -> LeaseFile | LeaseRow:
    """A file; where GPUSHARE_TEST_STORE names a database (tests/store), a row there that nobody has had."""
    if not (url := os.environ.get("GPUSHARE_TEST_STORE")):
        return LeaseFile(tmp_path)
    with Database(url).write(alone=False) as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS helper_lease")
    return LeaseRow(url)


def test_the_first_helper_has_it_and_a_second_one_waits(place: LeaseFile | LeaseRow) -> None:
    first = Lease(place)
    assert first.look() is None
    first.check()
    second = Lease(place)
    held = second.look()
    assert held is not None
    assert (held.number, held.host) == (1, socket.gethostname())
    with pytest.raises(NotInCharge):
        second.check()
    assert first.look() is None


def test_a_lease_that_is_not_renewed_is_taken_after_a_while_with_a_number_that_grows(
    place: LeaseFile | LeaseRow, now_s: list[float]
) -> None:
    assert place.take(0, ELSEWHERE)
    lease = Lease(place)
    assert lease.look() is not None
    now_s[0] += TAKEN_AFTER_S - 5
    place.renew(1, ELSEWHERE)
    for _ in range(3):
        assert lease.look() is not None, "it was renewed"
        now_s[0] += TAKEN_AFTER_S / 3
    now_s[0] += 1
    assert lease.look() is None
    assert lease.number == 2
    assert not place.renew(1, ELSEWHERE)
    assert not place.is_at(1)


def test_who_stood_still_for_a_minute_changes_nothing_and_hears_who_has_it(
    place: LeaseFile | LeaseRow, now_s: list[float]
) -> None:
    lease = Lease(place)
    assert lease.look() is None
    now_s[0] += 60
    assert place.take(1, ELSEWHERE)
    with pytest.raises(NotInCharge):
        lease.check()
    held = lease.look()
    assert held is not None
    assert held.host == "ctl2"


def test_a_number_that_has_grown_counts_even_within_the_time_of_a_renewal(place: LeaseFile | LeaseRow) -> None:
    lease = Lease(place)
    assert lease.look() is None
    assert place.take(1, ELSEWHERE)
    with pytest.raises(NotInCharge, match="another helper"):
        lease.check()


def test_without_a_renewal_nothing_is_changed_long_before_another_may_take_it(
    place: LeaseFile | LeaseRow, now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(place)
    assert lease.look() is None
    now_s[0] += BELIEVED_S - 1
    lease.check()
    now_s[0] += 2
    with pytest.raises(NotInCharge, match="renewed"):
        lease.check()
    assert lease.look() is None, "nobody has taken it meanwhile"
    lease.check()


def test_one_look_by_hand_that_takes_long_renews_it_unless_it_was_taken(
    place: LeaseFile | LeaseRow, now_s: list[float]
) -> None:
    lease = Lease(place)
    lease.look()
    now_s[0] += 10 * BELIEVED_S
    with pytest.raises(NotInCharge):
        lease.check()
    lease.renew_and_check()
    assert place.take(lease.number, ELSEWHERE)
    with pytest.raises(NotInCharge):
        lease.renew_and_check()


def test_a_lease_that_was_given_back_is_free_at_once(place: LeaseFile | LeaseRow) -> None:
    first, second = Lease(place), Lease(place)
    assert first.look() is None
    first.give_back()
    with pytest.raises(NotInCharge):
        first.check()
    assert second.look() is None
    assert second.number == 2


def test_a_process_of_this_machine_that_is_gone_leaves_it_at_once(place: LeaseFile | LeaseRow) -> None:
    say = "from slurm_gpushare.helper.lease import this_process; print(this_process())"
    child = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    holder = child.stdout.strip()
    assert is_gone(holder)
    assert not is_gone(this_process())
    assert not is_gone(ELSEWHERE)
    assert place.take(0, holder)
    assert Lease(place).look() is None


def test_of_many_who_take_it_at_once_one_gets_it(place: LeaseFile | LeaseRow) -> None:
    for before in range(20):
        got: list[int] = []

        def take(me: int, before: int = before, got: list[int] = got) -> None:
            if place.take(before, f"h{me} 1 x"):
                got.append(me)

        threads = [threading.Thread(target=take, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1, before


def test_only_the_acting_controllers_host_takes_it_and_gives_it_back_when_another_acts(
    place: LeaseFile | LeaseRow,
) -> None:
    acting: list[bool | None] = [False]
    lease = Lease(place, lambda: acting[0])
    assert lease.look() is not None
    acting[0] = None
    assert lease.look() is not None, "no slurmctld answers"
    acting[0] = True
    assert lease.look() is None
    acting[0] = None
    assert lease.look() is None, "kept: nothing can be changed now anyway"
    acting[0] = False
    assert lease.look() is not None
    assert Lease(place).look() is None


@pytest.mark.parametrize(
    ("answer", "acts"),
    [
        ("Slurmctld(primary) at {here} is UP\nSlurmctld(backup) at ctl2 is UP\n", True),
        ("Slurmctld(primary) at ctl2 is UP\nSlurmctld(backup) at {here} is UP\n", False),
        ("Slurmctld(primary) at ctl2 is DOWN\nSlurmctld(backup) at {here} is UP\n", True),
        ("Slurmctld(primary) at ctl2 is DOWN\nSlurmctld(backup) at {here} is DOWN\n", None),
        ("Slurmctld(primary) at ctl2 is UP\n", True),
        ("Slurmctld(primary) at ctl2 is DOWN\n", True),
        ("nonsense\n", None),
        (None, None),
    ],
)
def test_the_first_controller_that_is_up_acts_and_so_does_the_only_one(
    answer: str | None, acts: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ping() -> str:
        if answer is None:
            raise ControllerDown("scontrol: no answer")
        return answer.format(here=socket.gethostname().partition(".")[0])

    slurm = FakeSlurm()
    monkeypatch.setattr(slurm, "ping", ping)
    assert acts_here(slurm) is acts


# The helper.


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    places = {"StoreUrl": f"sqlite:///{tmp_path}/store.sqlite", "HookFile": f"{tmp_path}/hook.sqlite",
              "SpoolDir": f"{tmp_path}/spool", "StateDir": f"{tmp_path}/state", "PublicDir": f"{tmp_path}/public",
              "Partitions": "gpu", "TickSeconds": "1", "EpilogHold": "0"}  # fmt: skip
    path = tmp_path / "gpushare.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in places.items()))
    monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "good"))
    return load_config(path)


class SlurmWithState(FakeSlurm):
    """A Slurm whose controllers share a directory."""

    def __init__(self, directory: Path, **how: object) -> None:
        super().__init__(**how)  # type: ignore[arg-type]
        self.directory = directory

    def config(self) -> dict[str, str]:
        return {"StateSaveLocation": str(self.directory), "SlurmctldHost[0]": "ctl1"}


def test_a_second_helper_with_a_state_directory_of_its_own_does_nothing(config: Config, tmp_path: Path) -> None:
    place = LeaseFile(tmp_path)
    assert place.take(0, ELSEWHERE)
    slurm = SlurmWithState(tmp_path)
    with pytest.raises(GpushareError, match="the helper on ctl2 is in charge"):
        backfill(replace(config, state_dir=tmp_path / "own"), slurm, once=True, dry_run=False, policy=None)
    assert slurm.looks == 0
    assert not config.hook_file.exists()


def test_a_helper_whose_lease_is_taken_stands_by_and_leaves_nodes_and_hook_alone(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "RENEW_EVERY_S", 0.05)
    place, stood_by = LeaseFile(tmp_path), []

    def answer(look: int) -> None:
        if look == 2:
            assert place.take(1, ELSEWHERE)
        elif look > 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def waited(config: Config, slurm: FakeSlurm, lease: Lease | None, *, patient: bool) -> Lease:
        if lease is not None:
            stood_by.append(HookFile(config.hook_file).heartbeat_s())
            place.renew(2, "-")
        return stand_by(config, slurm, lease, patient=patient)

    monkeypatch.setattr(process_module, "stand_by", waited)
    slurm = SlurmWithState(tmp_path, on_look=answer)
    backfill(config, slurm, once=False, dry_run=False, policy=None)
    assert len(stood_by) == 1
    assert stood_by[0] != 0, "the hook listens to the other one"
    assert in_charge(config, slurm) is None, "given back at the end"
    assert place.read() is not None
    assert place.read()[0] == 3  # type: ignore[index]


@pytest.mark.timeout(60)
def test_a_helper_that_is_told_to_stop_while_its_lease_is_taken_stops(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "RENEW_EVERY_S", 0.05)
    place = LeaseFile(tmp_path)

    def lose(self: Lease) -> object:
        if self.number:
            assert place.take(self.number, ELSEWHERE)
            os.kill(os.getpid(), signal.SIGTERM)
        return look(self)

    look = Lease.look
    monkeypatch.setattr(Lease, "look", lose)
    stood_by: list[bool] = []

    def never_again(config: Config, slurm: FakeSlurm, lease: Lease | None, *, patient: bool) -> Lease:
        stood_by.append(lease is not None)
        assert lease is None, "it waits for its lease instead"
        return stand_by(config, slurm, lease, patient=patient)

    monkeypatch.setattr(process_module, "stand_by", never_again)
    backfill(config, SlurmWithState(tmp_path), once=False, dry_run=False, policy=None)
    assert stood_by == [False]
