"""Options that several commands have: they mean and say the same everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile

import click

from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.users import uid_of
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.values import expand_tasks, parse_time

FILE = click.Path(path_type=Path, dir_okay=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
NO_HEADER = click.option("-n", "--noheader", is_flag=True, help="No header and no lines below the table.")
PARSABLE = click.option("-P", "--parsable2", is_flag=True, help="Separate columns by | without padding.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would be done; change nothing.")
YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
HTML = click.option("--html", type=FILE, help="Write a self-contained page to this file.")
FORCE = click.option("--force", is_flag=True, help="Let --html replace a file that exists.")
SLURM_CLUSTERS = click.option("-M", "--clusters", default="", metavar="NAMES", help="Jobs of these Slurm clusters.")


# Checks of options that filter: a name that does not exist is an error, with exit code 2.


# squeue(1) and sacct(1), JOB STATE CODES, with the short forms that squeue takes.
STATES = {
    "BOOT_FAIL": "BF", "CANCELLED": "CA", "COMPLETED": "CD", "COMPLETING": "CG", "CONFIGURING": "CF",
    "DEADLINE": "DL", "FAILED": "F", "NODE_FAIL": "NF", "OUT_OF_MEMORY": "OOM", "PENDING": "PD", "PREEMPTED": "PR",
    "REQUEUED": "RQ", "REQUEUE_FED": "RF", "REQUEUE_HOLD": "RH", "RESIZING": "RS", "RESV_DEL_HOLD": "RD",
    "REVOKED": "RV", "RUNNING": "R", "SIGNALING": "SI", "SPECIAL_EXIT": "SE", "STAGE_OUT": "SO", "STOPPED": "ST",
    "SUSPENDED": "S", "TIMEOUT": "TO",
}  # fmt: skip
_JOB_ID = re.compile(r"\d+(?:_\d+|\+\d+)?")
_WAITING_TASKS = re.compile(r"(\d+)_(\[[^]]*\])")


def names(text: str) -> frozenset[str]:
    """A comma list as squeue takes it."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def check_users(text: str) -> set[int]:
    """The uids of users that exist, given by name or number."""
    return {existing_uid(name) for name in names(text)}


def existing_uid(user: str) -> int:
    uid = uid_of(user)
    if uid is None:
        raise BadInput(f"there is no user '{user}'")
    return uid


def check_states(text: str) -> frozenset[str]:
    """States by their long names."""
    longer = {short: name for name, short in STATES.items()}
    wanted = {name.upper() for name in names(text)}
    if unknown := sorted(wanted - STATES.keys() - longer.keys()):
        raise BadInput(f"there is no job state '{unknown[0]}'", "See squeue(1), JOB STATE CODES.")
    return frozenset(longer.get(name, name) for name in wanted)


def check_partitions(slurm: Slurm, text: str) -> frozenset[str]:
    """Partitions that exist, as far as slurmctld can be asked."""
    wanted = names(text)
    if wanted:
        try:
            known = {partition.name for partition in slurm.partitions()}
        except SlurmError:
            return wanted  # accounting answers without slurmctld
        _check("partition", wanted, known)
    return wanted


def check_period(starttime: str, endtime: str) -> tuple[datetime, datetime]:
    """Two times as sacct takes them, the second one later."""
    now = datetime.now()
    start, end = parse_time(starttime, now), parse_time(endtime, now)
    if end <= start:
        raise BadInput(f"the period is empty: it ends ({endtime}) before it starts ({starttime})")
    return start, end


def check_accounting_names(slurm: Slurm, kind: str, text: str) -> None:
    """Accounts or Slurm clusters, as far as accounting tells this user of them."""
    if wanted := names(text):
        try:
            known = slurm.accounting_names(kind)
        except SlurmError:
            return
        if known:
            _check(kind, wanted, known)


def check_nodes(wanted: Iterable[str], known: Iterable[str]) -> None:
    _check("node", wanted, known)


def _check(kind: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    there = set(known)
    if unknown := sorted(set(wanted) - there):
        few = sorted(there)[:8]
        hint = f"There are: {', '.join(few)}{', ...' if len(there) > len(few) else ''}." if few else ""
        raise BadInput(f"there is no {kind} '{unknown[0]}'", hint)


def check_counts(gpus: int, jobs: int | None) -> None:
    if gpus < 1:
        raise BadInput(f"--gpus {gpus}: at least one is needed")
    if jobs is not None and jobs < 1:
        raise BadInput(f"--jobs {jobs}: at least one is needed")


def check_directory(option: str, path: Path | None) -> None:
    """Before a long run: is there a directory for the file that is written at its end?"""
    if path is None:
        return
    if not path.parent.is_dir():
        raise BadInput(f"{option} {path}: no directory {path.parent}", "Make it first.")
    if why := why_not_writable(path.parent):
        raise BadInput(f"{option} {path}: cannot be written: {why}", "Name another file.")


def check_new_directory(option: str, path: Path) -> None:
    """Before a long run: can this directory be made, unless it is there, and written to?"""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if why := why_not_writable(there):
        raise BadInput(f"{option} {path}: cannot be written to: {why}", "Name another directory.")


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be made there. One is made to see: of root, permissions say nothing (NFS, read-only mounts)."""
    try:
        with TemporaryFile(dir=directory):
            return None
    except OSError as why:
        return why.strerror or str(why)


def check_job_ids(words: Iterable[str]) -> list[str]:
    """Job ids as squeue prints them, several in a word by commas; waiting tasks (``6_[0-3%2]``) one by one."""
    return [job_id for word in words for part in _COMMAS.split(word) if part or not word for job_id in _job_ids(part)]


_COMMAS = re.compile(r",(?![^[]*\])")


def _job_ids(text: str) -> list[str]:
    if _JOB_ID.fullmatch(text):
        return [text]
    if tasks := _WAITING_TASKS.fullmatch(text):
        try:
            return [f"{tasks[1]}_{task}" for task in expand_tasks(tasks[2])]
        except ValueError:
            pass
    raise BadInput(f"'{text}' is no job id", "Give it as squeue prints it: 14, 6_2, 6_[3-5].")
