"""Calls that may never come back: a driver in trouble can hang inside NVML for hours."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stuck(Exception):
    """The call has not returned in time; it may still."""


class Bounded:
    """Runs calls one after the other in a thread of its own and waits for each only so long.

    A thread, not a process: a second interpreter would double the sampler's memory. ctypes lets go of the
    interpreter's lock during a foreign call, so a hung one holds up nobody else; the thread is a daemon, so the
    process can still end.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._late = False
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Result], timeout_s: float) -> Result:
        """What `function` returns or raises; `Stuck` if that, or an earlier call, takes too long."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="bounded", daemon=True)
            self._thread.start()
        if self._late:
            try:
                self._answers.get_nowait()  # the late answer to a question nobody asks any more
            except queue.Empty:
                raise Stuck from None
            self._late = False
        self._calls.put(function)
        try:
            worked, answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._late = True
            raise Stuck from None
        if not worked:
            raise answer
        result: Result = answer
        return result

    def _serve(self) -> None:
        while True:
            function = self._calls.get()
            try:
                answer = (True, function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                answer = (False, error)
            self._answers.put(answer)
