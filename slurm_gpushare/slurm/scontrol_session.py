"""An ``scontrol`` that stays open, so that a change to a job costs a request and not a process.

The helper changes dozens of jobs in a busy second, and must be done before the nodes stop holding their cards. Without
a command ``scontrol`` reads commands from its input and prompts for the next one. It does not say how a command ended:
no word means that Slurm took the change, and after any word the caller asks again with a process of its own.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence

from slurm_gpushare.slurm.runner import DEFAULT_TIMEOUT_S, ControllerDown, environment

PROMPT = b"scontrol: "
LINES = 1000
"""After so many changes it is started anew: it remembers every line."""
START_S = 5.0
"""An scontrol that has not prompted by then is of no use here."""
RETRY_S = 60.0
"""How long such a one is not tried again."""
_PLAIN = re.compile(r"[A-Za-z0-9_.:;,=/@%+|()\[\]-]+", re.ASCII)
"""Words that mean the same on a line of input as in a list of arguments."""


class ScontrolSession:
    """One scontrol at a time, started when it is first needed. It ends when we do, because its input ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = 0
        self._not_before_s = 0.0

    def took(self, words: Sequence[str]) -> bool:
        """Give scontrol a command; True if Slurm took it without a word."""
        if not all(_PLAIN.fullmatch(word) for word in words):
            return False
        line = " ".join(words).encode("ascii")
        with self._lock:
            process = self._ready()
            if process is None:
                return False
            answer = self._ask(process, line)
            if answer is None or not _said_nothing(answer, line):
                self._end()
                return False
            return True

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ready(self) -> subprocess.Popen[bytes] | None:
        """The process, at its prompt; None if there is none to be had now."""
        if self._process is not None and self._lines >= LINES:
            self._end()
        if self._process is None and time.monotonic() >= self._not_before_s:
            self._start()
        return self._process

    def _start(self) -> None:
        # Its line editor must not read anybody's settings, nor think that it talks to a screen.
        plain = {"TERM": "dumb", "INPUTRC": "/dev/null"}
        try:
            self._process = subprocess.Popen(
                ["scontrol"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                env=environment() | plain,
            )  # fmt: skip
        except OSError:
            self._not_before_s = time.monotonic() + RETRY_S
            return
        self._lines = 0
        try:
            ready = _until_prompt(self._process, START_S)
        except TimeoutError:
            ready = None
        if ready is None:
            self._end()
            self._not_before_s = time.monotonic() + RETRY_S

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes | None:
        """What scontrol said, its echo of the line included; None if it is gone."""
        self._lines += 1
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            return _until_prompt(process, DEFAULT_TIMEOUT_S)
        except BrokenPipeError:
            return None
        except TimeoutError:
            self._end()
            raise ControllerDown(
                f"scontrol: no answer within {DEFAULT_TIMEOUT_S:g} s", "Check that slurmctld runs: scontrol ping."
            ) from None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _said_nothing(answer: bytes, line: bytes) -> bool:
    """Whether there is nothing in the answer but the echo of the line, of which a long one's end only is shown."""
    echo, _, rest = answer.partition(b"\n")
    shown = echo.removeprefix(b"\r<")
    return not rest.strip() and bool(shown) and (shown == line if shown == echo else line.endswith(shown))


def _until_prompt(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """What the process says before its next prompt; None if it ends instead."""
    assert process.stdout is not None
    said, until_s = b"", time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not said.endswith(PROMPT):
            if not selector.select(max(0.0, until_s - time.monotonic())):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                return None
            said += part
    return said.removesuffix(PROMPT)
