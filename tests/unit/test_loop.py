"""The loop: tasks wait for work without holding each other up, and no fault ends it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from slurm_gpushare.helper import loop as loop_module
from slurm_gpushare.helper.loop import SAID_AGAIN_AFTER_S, Faults, Loop, Work, at_once
from slurm_gpushare.protocol.errors import GpushareError, SlurmError


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(Faults())
    loop.open()
    yield loop
    loop.close()


def run(loop: Loop, until: Callable[[], bool], most_s: float = 10.0) -> None:
    end_s = time.monotonic() + most_s

    async def watch() -> None:
        while not until():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.002)

    assert loop.aio is not None
    loop.aio.run_until_complete(watch())


async def divided(by: int) -> float:
    return await Work(lambda: 1 / by)


def test_a_coroutine_gets_what_came_of_its_work_or_the_exception() -> None:
    assert at_once(divided(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        at_once(divided(0))


def test_work_that_hangs_holds_no_other_task_up(loop: Loop) -> None:
    stuck, rounds, threads = threading.Event(), [], set[str]()

    async def hang() -> None:
        await Work(stuck.wait, 20)

    async def quick() -> None:
        rounds.append(await Work(time.monotonic))
        threads.add(threading.current_thread().name)

    hanging, going = loop.task("hang", hang), loop.task("quick", quick, lambda: 0.0)
    hanging.want()
    going.want()
    run(loop, lambda: len(rounds) >= 20)
    assert hanging.doing is not None
    assert threads == {threading.main_thread().name}, "what a task remembers is touched by the loop alone"
    stuck.set()
    run(loop, lambda: hanging.doing is None)


def test_what_goes_wrong_where_an_event_is_heard_is_counted_and_the_next_is_heard(loop: Loop) -> None:
    heard: list[int] = []
    reader, writer = os.pipe()

    def hear() -> None:
        heard.append(len(os.read(reader, 3)))
        raise KeyError("of an event")

    assert loop.aio is not None
    loop.aio.add_reader(reader, hear)
    os.write(writer, b"abcde")
    run(loop, lambda: len(heard) == 2)
    loop.aio.remove_reader(reader)
    os.close(reader)
    os.close(writer)
    assert heard == [3, 2]
    assert loop.faults.counts == {"event": 2}


def test_the_end_waits_for_nobody_who_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loop_module, "LAST_WORDS_S", 0.1)
    loop, stuck, said, let_go = Loop(Faults()), threading.Event(), [], []
    loop.open()

    async def hang() -> None:
        try:
            await Work(stuck.wait, 20)
        finally:
            let_go.append(1)

    def fail() -> None:
        raise GpushareError("the board is gone")

    hanging = loop.task("hang", hang)
    hanging.want()
    run(loop, lambda: hanging.doing is not None)
    begun_s = time.monotonic()
    loop.close(Work(stuck.wait, 20), Work(said.append, "goodbye"), Work(fail))
    assert time.monotonic() - begun_s < 10
    stuck.set()
    assert (said, let_go) == (["goodbye"], [1])
    assert "the board is gone" in caplog.text


def test_what_fails_is_tried_again_later_each_time_and_news_do_not_shorten_it(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(loop_module, "LONGEST_RETRY_S", 0.2)
    tries: list[float] = []

    async def fail() -> None:
        tries.append(time.monotonic())
        if len(tries) < 6:
            raise SlurmError("squeue: no answer")

    task = loop.task("tick", fail, lambda: 0.01)
    task.want()

    def news() -> bool:
        task.want()
        return len(tries) >= 8

    run(loop, news)
    waited = [later - earlier for earlier, later in pairwise(tries)]
    assert all(took >= least for took, least in zip(waited, (0.05, 0.1, 0.2, 0.2, 0.2), strict=False))
    assert waited[6] < 0.2, "it works again"


ERRORS = [OSError(11, "fork refused"), OSError(24, "too many open files"), MemoryError(), RecursionError(), KeyError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_exception_ends_the_loop(loop: Loop, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "FIRST_RETRY_S", 0.0)
    went_well: list[int] = []
    numbers = itertools.count()

    def work() -> None:
        if next(numbers) < 2:
            raise error

    async def task() -> None:
        await Work(work)
        went_well.append(1)

    loop.task("tick", task).want()
    run(loop, lambda: bool(went_well))
    assert loop.faults.counts == {"tick": 2}


def test_a_thread_that_cannot_be_started_is_a_fault_like_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "FIRST_RETRY_S", 0.0)
    start, refusals, went_well = threading.Thread.start, iter([True, True]), []

    def refuse(thread: threading.Thread) -> None:
        if next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    async def task() -> None:
        try:
            went_well.append(await Work(int, "7"))
        finally:
            await Work(int, "8")

    loop.task("tick", task).want()
    run(loop, lambda: went_well == [7])


def test_a_fault_is_said_once_with_its_place_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpushare")
    now_s = [0.0]
    faults = Faults(lambda: now_s[0])
    for _ in range(5):
        with faults.contained("place"):
            at_once(divided(0))
    faults.well("place")
    with faults.contained("place"):
        pass
    (said, over) = caplog.messages
    assert said.startswith('event=place-failed error="ZeroDivisionError: division by zero" at=')
    assert said.endswith(" failures=1")
    assert over == "event=place-works-again failures=5"
    assert faults.counts == {"place": 5}


def test_a_fault_that_lasts_is_said_again_after_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    faults = Faults(lambda: now_s[0])
    for now_s[0] in (0.0, 10.0, SAID_AGAIN_AFTER_S + 1.0):
        faults.note("tick", GpushareError("slurmctld is away"))
    assert len(caplog.messages) == 2
    assert "at=" not in caplog.text, "the message says it well enough"


def test_what_is_somebody_elses_is_let_through() -> None:
    faults = Faults()
    with pytest.raises(SlurmError), faults.contained("place", SlurmError):
        raise SlurmError("squeue: no answer")
    assert not faults.counts
