"""How a command of Slurm's is run and its answer read: bounded in time, and with errors that callers can tell apart."""

from __future__ import annotations

import os
import re
import secrets
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from slurm_gpushare.protocol.errors import SlurmError


class SlurmMissing(SlurmError):
    """There is no Slurm here: no commands, or no configuration."""


class ControllerDown(SlurmError):
    """slurmctld does not answer. It will be back: wait and ask again."""

    def __init__(self, what: str, hint: str = "Check that slurmctld runs: scontrol ping.") -> None:
        super().__init__(what, hint)


class AccountingDown(SlurmError):
    """sacct has nobody to ask: slurmdbd is down, or accounting is not set up."""


class UpdateRefused(SlurmError):
    """slurmctld did not take a change to a job."""


class JobMovedOn(UpdateRefused):
    """The job started, ended or vanished before our change arrived. News, not a fault."""


# Run one Slurm command: bounded in time, with clean surroundings, and with errors that say what to do.


# slurmctld gives up on a message after MessageTimeout, 10 s by default; a healthy one answers in milliseconds.
DEFAULT_TIMEOUT_S = 30.0

# A user's own settings of the commands (SQUEUE_FORMAT, SACCT_FEDERATION, ...) would change what we read.
_PERSONAL = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN")

_NO_CONFIGURATION = ("could not establish a configuration source", "unable to process configuration file")
_NO_CONTROLLER = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "communication connection failure",
    "slurm backup controller in standby mode",
    "transport endpoint is not connected",
)
_NO_ACCOUNTING = (
    "accounting storage is disabled",
    "problem talking to the database",
    "sending persistmsg",
    "slurm_persist_conn_open",
    "unable to contact slurmdbd",
)
BUSY = "resource temporarily unavailable"
_MOVED_ON = (
    "invalid job id specified",
    "job is no longer pending",
    "job has already finished",
    "already completing or completed",
    "is not pending",
    "job is not running",
    "job is pending execution",
    "job requeue",
    # slurmctld has no time for this job just now (26.05, some seconds after a submission): the next look tries again.
    BUSY,
    # Of a job that has just started elsewhere: its node list can only shrink. Names come from sinfo, so they are valid.
    "invalid node name specified",
)


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of our Slurm commands: unix times, array tasks to the last one, nothing personal."""
    kept = {name: value for name, value in base.items() if not name.startswith(_PERSONAL)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}


def failure(command: str, stderr: str) -> SlurmError:
    """The error that a failed command's words stand for."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(lines).lower()
    what = f"{command}: {lines[-1] if lines else 'failed without a word'}"
    if any(sign in text for sign in _NO_CONFIGURATION):
        return SlurmMissing(f"{command}: no Slurm configuration found", "Set SLURM_CONF, or run this on a Slurm host.")
    if command in {"sacct", "sacctmgr"} and any(sign in text for sign in _NO_ACCOUNTING + _NO_CONTROLLER):
        return AccountingDown(what, "Check AccountingStorageType in slurm.conf and that slurmdbd runs.")
    if any(sign in text for sign in _NO_CONTROLLER):
        return ControllerDown(what)
    if command == "scontrol":
        return JobMovedOn(what) if any(sign in text for sign in _MOVED_ON) else UpdateRefused(what)
    return SlurmError(what)


def run(
    argv: Sequence[str],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
) -> str:
    """What the command prints on stdout; any failure is a `SlurmError`.

    `settings` are variables of the command's environment: only its own user can read them.
    """
    command = os.path.basename(argv[0])
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env={**environment(os.environ if environ is None else environ), **(settings or {})},
            check=False,
        )
    except FileNotFoundError:
        raise SlurmMissing(f"{command}: no such command", "Install Slurm's client commands, or fix PATH.") from None
    except PermissionError as why:
        raise SlurmError(f"{command}: cannot be run: {why.strerror}") from why
    except subprocess.TimeoutExpired:
        raise ControllerDown(f"{command}: no answer within {timeout_s:g} s") from None
    stderr = done.stderr.decode("utf-8", "replace")
    if done.returncode != 0:
        raise failure(command, stderr)
    return done.stdout.decode("utf-8", "replace")


# Explicit columns in, rows out, whatever users write into their comments.
#
# The delimiter is random for every call and nobody else can read it: squeue gets it in its environment, since every
# user of the machine can read a command line. A comment with bars, commas or line breaks, or one made to look like a
# row of its own, can therefore never shift a column.
#
# sacct takes a delimiter on its command line alone. But it prints times as its environment says, so each of its rows
# begins with a time that carries a second random word, which only its own user can read.


def new_delimiter() -> str:
    """128 random bits. Letters, digits and ``~_-`` pass through every command's format option."""
    return f"~{secrets.token_urlsafe(16)}~"


def time_format(mark: str) -> dict[str, str]:
    """A setting of sacct's environment: unix times with `mark` before them. Slurm takes formats of up to 31 letters."""
    return {"SLURM_TIME_FORMAT": f"{mark}%s"}


def format_option(columns: Sequence[str], delimiter: str) -> str:
    """The value of ``squeue -O`` and ``sinfo -O``; width 0 means as wide as the value."""
    return ",".join(f"{column}:0{delimiter}" for column in columns)


def _unreadable(why: str) -> SlurmError:
    return SlurmError(f"cannot read Slurm's answer: {why}", "This Slurm release is not known.")


def value_rows(output: str, width: int, delimiter: str) -> Iterator[list[str]]:
    """The values of each row; every column ends with the delimiter, every row with a line break after it.

    Row by row: a list of all fields would take several times the memory of the answer.
    """
    start, row_end = 0, f"{delimiter}\n"
    output = output if output.endswith("\n") else f"{output}\n"
    while (end := output.find(row_end, start)) >= 0:
        row = output[start:end].split(delimiter)
        while len(row) < width and (end := output.find(row_end, end + len(row_end))) >= 0:
            row = output[start:end].split(delimiter)  # that was no row's end: a value begins with a line break
        if len(row) != width:
            break
        yield row
        start = end + len(row_end)
    if rest := output[start:].replace(delimiter, " ").strip():
        raise _unreadable(f"no row of {width} fields in '{rest[:40]}'")


def rows(output: str, columns: Sequence[str], delimiter: str) -> Iterator[dict[str, str]]:
    """One dictionary a row."""
    for row in value_rows(output, len(columns), delimiter):
        yield dict(zip(columns, row, strict=True))


def marked_rows(output: str, columns: Sequence[str], delimiter: str, mark: str) -> Iterator[dict[str, str]]:
    """The rows of an answer whose first column is a time that begins with `mark`, as all times in it do.

    Nobody but us knows the mark, so no text makes a row of its own. Who knows the delimiter can make the columns of
    their own row too many: that row is left out.
    """
    start, row_start = 0, f"\n{mark}"
    output = f"\n{output}"
    end = output.find(row_start)
    if rest := output[: end if end >= 0 else len(output)].replace(delimiter, " ").strip():
        raise _unreadable(f"no row in '{rest[:40]}'")
    while end >= 0:
        start = end + len(row_start)
        end = output.find(row_start, start)
        row = output[start : end if end >= 0 else len(output)].removesuffix("\n").removesuffix(delimiter)
        values = row.replace(mark, "").split(delimiter)
        if len(values) < len(columns):
            raise _unreadable(f"no row of {len(columns)} fields in '{' '.join(values)[:40]}'")
        if len(values) == len(columns):
            yield dict(zip(columns, values, strict=True))


# An ``scontrol`` that stays open, so that a change to a job costs a request and not a process.
#
# The helper changes dozens of jobs in a busy second, and must be done before the nodes stop holding their cards.
# Without a command ``scontrol`` reads commands from its input and prompts for the next one. It does not say how a
# command ended: no word means that Slurm took the change, and after any word the caller asks again with a process of
# its own.


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
            raise ControllerDown(f"scontrol: no answer within {DEFAULT_TIMEOUT_S:g} s") from None

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
