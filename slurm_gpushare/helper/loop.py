"""One loop: tasks that are due run one step after the other, and whatever may block runs beside it, on values.

A task is a coroutine in the loop's thread. It leaves that thread at ``await Work(function, ...)`` alone: the function
then runs in the task's own worker, with what it was given, and what it returns comes back. Workers never see what the
coroutines remember, so nothing of it needs a lock; and while one waits, for Slurm or for a file system that is stuck,
all other tasks go on.

No exception ends the loop. It is logged once with its place, counted, and its task is tried again, later each time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.errors import GpushareError

T = TypeVar("T")
Doing = Coroutine["Work[Any]", Any, T]

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 30.0
"""Between two tries of what fails. Not longer: until it works again nobody shares."""
REMEMBERED_FAULTS = 200
SAID_AGAIN_AFTER_S = 3600.0
"""A fault that lasts is logged again after so long."""
PACKAGE = str(Path(__file__).resolve().parents[1])


class Work(Generic[T]):
    """A call that may block. `await` it in a coroutine of the loop, and hand it values only."""

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def do(self) -> T:
        return self._function(*self._arguments)

    def __await__(self) -> Generator[Work[T], T, T]:
        return (yield self)


def at_once(doing: Doing[T]) -> T:
    """Run a coroutine from end to end with nothing beside it: for one look by hand."""
    result: Any = None
    error: Exception | None = None
    while True:
        try:
            work = doing.send(result) if error is None else doing.throw(error)
        except StopIteration as end:
            found: T = end.value
            return found
        result, error = None, None
        try:
            result = work.do()
        except Exception as why:  # noqa: BLE001 - the coroutine is told, as if it had called the function itself
            error = why


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
        self,
        loop: Loop,
        name: str,
        begin: Callable[[], Doing[None]],
        every_s: Callable[[], float] | None,
        quiet: bool,
    ) -> None:
        """`every_s` says when it is due again after it went well; without it only `want` makes it due.

        The worker of a `quiet` one has a lower priority.
        """
        self.name = name
        self._quiet = quiet
        self.failures = 0
        self.took_s = 0.0
        """Its last run, from beginning to end."""
        self._loop, self._begin, self._every_s = loop, begin, every_s
        self.due_s = float("inf")
        """When it begins, by the monotonic clock."""
        self._doing: Doing[None] | None = None
        self._begun_s = 0.0
        self._wanted_s = float("inf")
        self._worker: queue.SimpleQueue[Work[Any] | None] | None = None

    @property
    def running(self) -> bool:
        return self._doing is not None

    @property
    def running_s(self) -> float:
        """For how long it has been running."""
        return time.monotonic() - self._begun_s if self.running else 0.0

    def want(self, after_s: float = 0.0, *, urgent: bool = False) -> None:
        """Let it begin so soon, once more if it runs now. What fails keeps its own time, unless it is `urgent`."""
        at_s = time.monotonic() + after_s
        if self.running:
            self._wanted_s = min(self._wanted_s, at_s)
        elif urgent or not self.failures:
            self.due_s = min(self.due_s, at_s)

    def begin(self) -> None:
        self._doing, self._begun_s = self._begin(), time.monotonic()
        self._wanted_s = self.due_s = float("inf")
        self.go_on(None, None)

    def go_on(self, result: Any, error: Exception | None) -> None:
        """Let it run until it waits for work, or ends. Never raises."""
        assert self._doing is not None
        try:
            work = self._doing.send(result) if error is None else self._doing.throw(error)
            self._give(work)
        except StopIteration:
            self._ended(None)
        except Exception as why:  # noqa: BLE001 - whatever it was, the loop goes on
            self._ended(why)

    def _ended(self, error: Exception | None) -> None:
        now_s = time.monotonic()
        if self._doing is not None:
            with contextlib.suppress(RuntimeError):  # it waits for work even then
                self._doing.close()
        self._doing, self.took_s = None, now_s - self._begun_s
        if error is None:
            self.failures = 0
            self._loop.faults.well(self.name)
            every_s = float("inf") if self._every_s is None else self._every_s()
            self.due_s = min(now_s + every_s, self._wanted_s)
        else:
            self.failures += 1
            self.due_s = now_s + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self.failures - 1, 8))
            self._loop.faults.note(self.name, error)
            self._loop.on_fault(error)

    def _give(self, work: Work[Any]) -> None:
        if self._worker is None:
            orders: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(orders,), name=f"{self.name}-work", daemon=True).start()
            self._worker = orders
        self._worker.put(work)

    def close(self) -> None:
        """Let the worker end."""
        if self._worker is not None:
            self._worker.put(None)

    def _work(self, orders: queue.SimpleQueue[Work[Any] | None]) -> None:
        """The worker: values in, a value or an exception out."""
        if self._quiet:
            log.lower_priority()
        while (work := orders.get()) is not None:
            try:
                self._loop.hand_back(self, work.do(), None)
            except Exception as why:  # noqa: BLE001 - the coroutine that waits for it is told
                self._loop.hand_back(self, None, why)


class Loop:
    """Looks at what has happened, and lets tasks begin and go on."""

    def __init__(self, faults: Faults, on_fault: Callable[[Exception], None] = lambda error: None) -> None:
        self.faults, self.on_fault = faults, on_fault
        self.longest_s = 0.0
        """The longest time between two looks at what has happened."""
        self._tasks: list[Task] = []
        self._done: deque[tuple[Task, Any, Exception | None]] = deque()
        self._ready: list[tuple[Task, Any, Exception | None]] = []
        self._heard: dict[int, Callable[[], None]] = {}
        self._wake = self.waker = -1
        self._poll = select.poll()

    def open(self) -> None:
        """Open all that the loop needs: later there may be no file left to open."""
        self._wake, self.waker = os.pipe()
        for end in (self._wake, self.waker):
            os.set_blocking(end, False)
        self._poll.register(self._wake, select.POLLIN)

    @property
    def is_open(self) -> bool:
        return self.waker >= 0

    def task(
        self,
        name: str,
        begin: Callable[[], Doing[None]],
        every_s: Callable[[], float] | None = None,
        *,
        quiet: bool = False,
    ) -> Task:
        """A new task, which is due when it is wanted. Those made first come first."""
        self._tasks.append(Task(self, name, begin, every_s, quiet))
        return self._tasks[-1]

    def listen(self, handle: int, heard: Callable[[], None]) -> None:
        """Call `heard` at once when there is something to read."""
        self._heard[handle] = heard
        self._poll.register(handle, select.POLLIN)

    def forget(self, handle: int) -> None:
        """Listen to it no more."""
        del self._heard[handle]
        self._poll.unregister(handle)

    def hand_back(self, task: Task, result: Any, error: Exception | None) -> None:
        """From a worker: what came of its work."""
        self._done.append((task, result, error))
        with contextlib.suppress(OSError):  # it is awake already, or closed
            os.write(self.waker, b"x")

    def step(self, longest_s: float = 1.0) -> None:
        """Wait until something is to be done, at most so long, and do a bounded part of it."""
        due_s = min((task.due_s for task in self._tasks if not task.running), default=float("inf"))
        wait_s = 0.0 if self._done or self._ready else max(0.0, min(longest_s, due_s - time.monotonic()))
        ready = [handle for handle, _ in self._poll.poll(round(1000 * wait_s) + (wait_s > 0.0))]
        begun_s = time.monotonic()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        for handle in ready:
            if handle in self._heard:
                with self.faults.contained("event"):
                    self._heard[handle]()
        while self._done:
            self._ready.append(self._done.popleft())
        if self._ready:
            at = min(range(len(self._ready)), key=lambda at: self._tasks.index(self._ready[at][0]))
            task, result, error = self._ready.pop(at)
            task.go_on(result, error)
        else:
            self._begin_one()
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)

    def _begin_one(self) -> None:
        now_s = time.monotonic()
        task = next((task for task in self._tasks if not task.running and task.due_s <= now_s), None)
        if task is not None:
            task.begin()

    def close(self) -> None:
        """Nothing goes on any more; a worker that is at work ends with it."""
        for task in self._tasks:
            task.close()
        wake, waker = self._wake, self.waker
        self._wake = self.waker = -1
        os.close(wake)
        os.close(waker)


def with_patience(work: Work[Any], most_s: float) -> bool:
    """Do last things that may hang; whether they were done in time."""
    done = threading.Event()

    def run() -> None:
        try:
            work.do()
        except (OSError, GpushareError) as why:
            log.warning("stop", error=str(why))
        done.set()

    threading.Thread(target=run, name="last-words", daemon=True).start()
    return done.wait(most_s)
