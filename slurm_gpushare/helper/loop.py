"""One loop, asyncio's: tasks that are due run in one thread, and whatever may block runs beside it, on values.

A task is a coroutine. It leaves the loop's thread at ``await Work(function, ...)`` alone: the function then runs in
the task's own worker, with what it was given, and what it returns comes back. Workers never see what the coroutines
remember, so nothing of it needs a lock; and while one waits, for Slurm or for a file system that is stuck, all other
tasks go on.

No exception ends the loop. It is logged once with its place, counted, and its task is tried again, later each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, TypeVar

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.errors import GpushareError

T = TypeVar("T")
Doing = Coroutine[Any, Any, T]

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 30.0
"""Between two tries of what fails. Not longer: until it works again nobody shares."""
REMEMBERED_FAULTS = 200
SAID_AGAIN_AFTER_S = 3600.0
"""A fault that lasts is logged again after so long."""
LAST_WORDS_S = 2.0
"""What may hang is given so long when the loop ends."""
PACKAGE = str(Path(__file__).resolve().parents[1])


class Worker:
    """A thread for what may block. Nobody waits for it at the end: it ends with the process, also when it hangs."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        """`quiet`: with a lower priority."""
        self._name, self._quiet = name, quiet
        self._orders: queue.SimpleQueue[tuple[Work[Any], asyncio.Future[Any]] | None] | None = None

    def do(self, work: Work[T]) -> asyncio.Future[T]:
        """What comes of the work. Raises RuntimeError if there can be no further thread."""
        if self._orders is None:
            orders: queue.SimpleQueue[tuple[Work[Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(orders,), name=f"{self._name}-work", daemon=True).start()
            self._orders = orders
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._orders.put((work, future))
        return future

    def close(self) -> None:
        if self._orders is not None:
            self._orders.put(None)

    def _run(self, orders: queue.SimpleQueue[tuple[Work[Any], asyncio.Future[Any]] | None]) -> None:
        if self._quiet:
            log.lower_priority()
        while (order := orders.get()) is not None:
            work, future = order
            result, error = None, None
            try:
                result = work.do()
            except Exception as why:  # noqa: BLE001 - the coroutine that waits for it is told
                error = RuntimeError("StopIteration") if isinstance(why, StopIteration) else why
            with contextlib.suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # nobody waits for it any more
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_WORKER: ContextVar[Worker | None] = ContextVar("worker", default=None)
"""Of the task that runs; None outside of the loop."""


class Work(Generic[T]):
    """A call that may block. `await` it in a coroutine of the loop, and hand it values only."""

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def do(self) -> T:
        return self._function(*self._arguments)

    def __await__(self) -> Generator[Any, None, T]:
        worker = _WORKER.get()
        return self.do() if worker is None else (yield from worker.do(self))


def at_once(doing: Doing[T]) -> T:
    """Run a coroutine that waits for work alone from end to end, with nothing beside it: for one look by hand."""
    try:
        doing.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise AssertionError("it waits for something else")


class Faults:
    """What went wrong: said once with its place, and counted by kind for ``gpushare_errors_total``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[str, float, int]] = {}
        """By kind: what was said, when, and how often it has happened since it last went well."""
        self.counts: Counter[str] = Counter()
        """Since they were last written down."""
        self.first: Exception | None = None

    def note(self, kind: str, error: Exception) -> None:
        """It went wrong. Said if it is another fault than the last one of its kind."""
        self.first = self.first or error
        self.counts[kind] += 1
        text, now_s = _text(error), self._clock()
        said, at_s, failures = self._said.get(kind, ("", now_s, 0))
        new = text != said or now_s - at_s >= SAID_AGAIN_AFTER_S
        self._said[kind] = (text, now_s if new else at_s, failures + 1)
        while len(self._said) > REMEMBERED_FAULTS:
            del self._said[next(iter(self._said))]
        if new:
            log.warning(f"{kind}-failed", error=text, at=place_of(error), failures=failures + 1)

    def well(self, kind: str) -> None:
        """It went well; said if it had gone wrong before."""
        if (before := self._said.pop(kind, None)) is not None:
            log.info(f"{kind}-works-again", failures=before[2])

    @contextlib.contextmanager
    def contained(self, kind: str, *but: type[Exception]) -> Iterator[None]:
        """What goes wrong in here ends nothing else; exceptions of the types in `but` are somebody else's."""
        try:
            yield
        except but:
            raise
        except Exception as error:  # noqa: BLE001 - that is its purpose: it is said and counted
            self.note(kind, error)
        else:
            self.well(kind)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, GpushareError) else f"{type(error).__name__}: {error}"


def place_of(error: Exception) -> str | None:
    """Where in this package it went wrong, as ``helper/tick.py:120``; None for what a message explains well enough."""
    if isinstance(error, GpushareError):
        return None
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    return f"{os.path.relpath(ours[-1].filename, PACKAGE)}:{ours[-1].lineno}" if ours else None


class Task:
    """Something that is done again and again, never twice at once."""

    def __init__(
        self, loop: Loop, name: str, begin: Callable[[], Doing[None]], every_s: Callable[[], float], quiet: bool
    ) -> None:
        self.name, self._loop, self._begin, self._every_s = name, loop, begin, every_s
        self.worker = Worker(name, quiet=quiet)
        self.failures = 0
        self.took_s = 0.0
        """Its last run, from beginning to end."""
        self.doing: asyncio.Task[None] | None = None
        """Its run; None while it waits for its time."""
        self._wanted_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def want(self, after_s: float = 0.0, *, urgent: bool = False) -> None:
        """Let it begin so soon, once more if it runs now. What fails keeps its own time, unless it is `urgent`.

        Nothing begins before the loop is open.
        """
        at_s = time.monotonic() + after_s
        if self.doing is not None:
            self._wanted_s = min(self._wanted_s, at_s)
        elif urgent or not self.failures:
            self._begin_at(min(at_s, self._timer.when() if self._timer else math.inf))

    def _begin_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        aio = self._loop.aio
        self._timer = aio.call_at(at_s, self._start, aio) if aio is not None and at_s < math.inf else None

    def _start(self, aio: asyncio.AbstractEventLoop) -> None:
        self._timer, self._wanted_s = None, math.inf
        if self._loop.over.is_set():
            return
        self.doing = aio.create_task(self._run())

    async def _run(self) -> None:
        """Once, whatever comes of it."""
        _WORKER.set(self.worker)
        begun_s, fault = time.monotonic(), None
        try:
            await self._begin()
        except Exception as error:  # noqa: BLE001 - whatever it was, the loop goes on
            fault = error
        now_s = time.monotonic()
        self.doing, self.took_s = None, now_s - begun_s
        if fault is None:
            self.failures = 0
            self._loop.faults.well(self.name)
            self._begin_at(min(now_s + self._every_s(), self._wanted_s))
        else:
            self.failures += 1
            self._begin_at(now_s + retry_s(self.failures))
            self._loop.faults.note(self.name, fault)
            self._loop.on_fault(fault)


def retry_s(failures: int) -> float:
    """How long to wait after so many failures."""
    return min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 8))


class Loop:
    """The tasks, and asyncio's loop while it is open."""

    def __init__(self, faults: Faults, on_fault: Callable[[Exception], None] = lambda error: None) -> None:
        self.faults, self.on_fault = faults, on_fault
        self.aio: asyncio.AbstractEventLoop | None = None
        self.over = asyncio.Event()
        """Set it when it is time to end: nothing begins any more."""
        self._tasks: list[Task] = []

    def open(self) -> asyncio.AbstractEventLoop:
        """Open all that the loop needs: later there may be no file left to open."""
        self.aio = asyncio.new_event_loop()
        self.aio.set_exception_handler(self._note)
        return self.aio

    def task(
        self,
        name: str,
        begin: Callable[[], Doing[None]],
        every_s: Callable[[], float] = lambda: math.inf,
        *,
        quiet: bool = False,
    ) -> Task:
        """A new task, which is due when it is wanted, and `every_s` after it went well.

        The worker of a `quiet` one has a lower priority.
        """
        self._tasks.append(Task(self, name, begin, every_s, quiet))
        return self._tasks[-1]

    def close(self, *last_words: Work[Any]) -> None:
        """Nothing goes on any more. Last words may hang, each as long as what is under way may: not for long."""
        aio, self.aio = self.aio, None
        assert aio is not None
        running = [task.doing for task in self._tasks if task.doing is not None]
        for doing in running:
            doing.cancel()
        try:
            aio.run_until_complete(self._last(running, last_words))
        finally:
            for task in self._tasks:
                task.worker.close()
            aio.close()

    async def _last(self, running: list[asyncio.Task[None]], last_words: tuple[Work[Any], ...]) -> None:
        workers = [Worker("last-words") for _ in last_words]
        said = [worker.do(work) for worker, work in zip(workers, last_words, strict=True)]
        if waiting := [*running, *said]:
            await asyncio.wait(waiting, timeout=LAST_WORDS_S)
        for worker, future in zip(workers, said, strict=True):
            worker.close()
            if future.done() and (error := future.exception()) is not None:
                log.warning("stop", error=str(error))

    def _note(self, aio: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What goes wrong outside of a task: where an event is heard."""
        if isinstance(error := context.get("exception"), Exception):
            self.faults.note("event", error)
