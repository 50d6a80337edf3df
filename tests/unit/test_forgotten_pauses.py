"""A job that we paused goes on, also where slurmctld has forgotten the pause."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import NOW, TOKEN_A, running

from slurm_gpushare.helper.pauses import LEAST_S, SETTLE_S, ForgottenPauses
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store


class Commands:
    """Slurm, with what was asked of it; slurmctld started at `booted_s`."""

    def __init__(self, booted_s: int) -> None:
        self.asked: list[str] = []
        self._booted_s = booted_s

    def config(self) -> dict[str, str]:
        return {"BOOT_TIME": str(self._booted_s)}

    def update_job(self, key: str, changes: dict[str, str]) -> None:
        self.asked.append(f"update {key}")

    def suspend(self, key: str) -> None:
        self.asked.append(f"suspend {key}")


AGAIN = ["update 7", "suspend 7"]


def guest(mark: str = "", state: str = "RUNNING") -> Job:
    return running("7", "n0", "gres/shard:v100_0:1", state=state, tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1{mark}")


def pauses_of(slurm: Commands, *, paused_s: int | None = NOW - 20) -> ForgottenPauses:
    pauses = ForgottenPauses(slurm)  # type: ignore[arg-type]
    if paused_s is not None:
        pauses.paused(guest(), paused_s)
    return pauses


def test_a_pause_that_slurm_knows_is_left_alone() -> None:
    slurm = Commands(booted_s=NOW - 15)
    assert pauses_of(slurm).pause_again([guest(f";p={NOW - 20}", "SUSPENDED")], NOW) == set()
    assert slurm.asked == []


@pytest.mark.parametrize("mark", ["", f";p={NOW - 20}"], ids=["the mark is forgotten too", "the mark is there"])
def test_a_pause_that_a_new_slurmctld_does_not_know_is_made_again(mark: str) -> None:
    slurm = Commands(booted_s=NOW - 15)
    assert pauses_of(slurm).pause_again([guest(mark)], NOW) == {7}
    assert slurm.asked == AGAIN


def test_a_slurmctld_that_has_just_started_is_given_time() -> None:
    """Its messages to nodes may come late, in any order."""
    slurm = Commands(booted_s=NOW - 15)
    pauses = pauses_of(slurm, paused_s=NOW - 20)
    assert pauses.pause_again([guest()], NOW - 10) == set()
    assert slurm.asked == []
    assert pauses.pause_again([guest()], NOW) == {7}
    again = guest(f";p={NOW}", "SUSPENDED")
    assert not pauses.may_end(again, NOW + LEAST_S)
    assert pauses.may_end(again, NOW + SETTLE_S)


def test_no_pause_ends_just_after_slurmctld_has_started() -> None:
    """Nodes that have not registered anew would never hear of it."""
    paused = guest(f";p={NOW - 20}", "SUSPENDED")
    assert not pauses_of(Commands(booted_s=NOW - 5)).may_end(paused, NOW)
    assert pauses_of(Commands(booted_s=NOW - 15)).may_end(paused, NOW)
    assert pauses_of(Commands(booted_s=NOW - 5)).may_end(guest(f";p={NOW - 20}"), NOW), "it runs: only the mark goes"


@pytest.mark.parametrize("mark", ["", f";p={NOW - 20}"])
def test_whom_somebody_else_let_go_on_is_not_paused_again(mark: str) -> None:
    slurm = Commands(booted_s=NOW - 1000)
    assert pauses_of(slurm).pause_again([guest(mark)], NOW) == set()
    assert slurm.asked == []


def test_a_job_that_we_let_go_on_is_not_touched() -> None:
    slurm = Commands(booted_s=NOW - 15)
    pauses = pauses_of(slurm)
    pauses.resumed(guest())
    assert pauses.pause_again([guest()], NOW) == set()
    assert slurm.asked == []


@pytest.mark.parametrize(("kinds", "asked"), [(["paused"], AGAIN), (["paused", "resumed"], []), (["placed"], [])])
def test_a_new_helper_knows_it_from_the_store(tmp_path: Path, kinds: list[str], asked: list[str]) -> None:
    slurm = Commands(booted_s=NOW - 15)
    pauses = pauses_of(slurm, paused_s=None)
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decisions.add([Decision(7, NOW - 20, kind) for kind in kinds])
        pauses.recall(store, [guest()])
    pauses.pause_again([guest()], NOW)
    assert slurm.asked == asked
