"""What can go wrong between us and Slurm, told apart because callers react differently."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from slurm_gpushare.protocol.errors import SlurmError


class SlurmMissing(SlurmError):
    """There is no Slurm here: no commands, or no configuration."""


class ControllerDown(SlurmError):
    """slurmctld does not answer. It will be back: wait and ask again."""


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
        return ControllerDown(what, "Check that slurmctld runs: scontrol ping.")
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
        raise ControllerDown(
            f"{command}: no answer within {timeout_s:g} s", "Check that slurmctld runs: scontrol ping."
        ) from None
    stderr = done.stderr.decode("utf-8", "replace")
    if done.returncode != 0:
        raise failure(command, stderr)
    return done.stdout.decode("utf-8", "replace")


# Explicit columns in, rows out, whatever users write into their comments.
#
# The delimiter is random for every call and nobody else can read it: squeue gets it in its environment, since every
# user of the machine can read a command line. A comment with bars, commas or line breaks, or one made to look like a
# row
# of its own, can therefore never shift a column.
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
