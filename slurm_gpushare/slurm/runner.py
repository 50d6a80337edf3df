"""Run one Slurm command: bounded in time, with clean surroundings, and with errors that say what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from slurm_gpushare.slurm.errors import (
    AccountingDown,
    ControllerDown,
    JobMovedOn,
    SlurmError,
    SlurmMissing,
    UpdateRefused,
)

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
