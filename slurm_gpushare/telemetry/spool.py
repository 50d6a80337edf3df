"""Records on their way to the controller: one file each, complete or not there at all, its author proven.

A file's content is a munge credential around the record. Munge says which uid made it, which file ownership
cannot: NFS with root_squash gives root's files to nobody.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurm_gpushare.config import Config
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.telemetry.record import Kind, Record

INCOMING = "incoming"
SUFFIX = ".rec"
# Anyone may add a file, only its owner and ours may remove one, and nobody else can list them.
INCOMING_MODE = 0o1733


class SpoolError(GpushareError):
    """A record could not be left in the spool directory."""


def spool_name(record: Record) -> str:
    """``gpu0-4711-<run>-i.rec``. An interim record replaces its run's last one, should that still be waiting."""
    return f"{record.node}-{record.job_id}-{record.run_id}-{'f' if record.kind is Kind.FINAL else 'i'}{SUFFIX}"


def seal(line: str, munge_socket: Path | None = None) -> str:
    """`line` in a munge credential of whoever runs this."""
    argv = ["munge", *([f"--socket={munge_socket}"] if munge_socket else [])]
    try:
        done = subprocess.run(argv, input=line, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SpoolError(f"munge: {type(error).__name__}", "Is munge installed, and munged running?") from error
    if done.returncode != 0:
        raise SpoolError(f"munge: exit code {done.returncode}: {done.stderr.strip()[:200]}", "Is munged running?")
    return done.stdout


def send_record(record: Record, config: Config) -> None:
    """Leave the record where the site wants it: in the spool, or in the store's inbox."""
    if config.records_to == "spool":
        write_record(record, config.spool_dir, config.munge_socket)
        return
    credential = seal(record.to_json(), config.munge_socket)
    argv = [sys.executable, "-m", "slurm_gpushare.store.deliver"]
    try:
        done = subprocess.run(argv, input=credential, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SpoolError(f"StoreUrl: {type(error).__name__}") from error
    if done.returncode:
        raise SpoolError(f"StoreUrl: {done.stderr.strip()[-300:]}")


def write_record(record: Record, spool_dir: Path, munge_socket: Path | None = None) -> Path:
    """Leave the record in the spool, by rename; a failure leaves nothing behind."""
    credential = seal(record.to_json(), munge_socket)
    incoming = spool_dir / INCOMING
    path = incoming / spool_name(record)
    partial = incoming / f".{record.record_id}.tmp"  # ingest takes *.rec only
    try:
        if not incoming.is_dir():
            _make_incoming(incoming)
        try:
            with partial.open("x", encoding="ascii") as file:
                file.write(credential)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if record.kind is Kind.FINAL:
            path.with_name(path.name.replace(f"-f{SUFFIX}", f"-i{SUFFIX}")).unlink(missing_ok=True)
    except OSError as error:
        raise SpoolError(f"{incoming}: {error.strerror}", "Is SpoolDir there, writable and not full?") from error
    return path


def _make_incoming(incoming: Path) -> None:
    incoming.mkdir(parents=True, exist_ok=True)
    incoming.chmod(INCOMING_MODE)
    if os.geteuid() == 0:  # whoever owns the spool ingests, and must be able to remove files from the sticky directory
        owner = incoming.parent.stat()
        os.chown(incoming, owner.st_uid, owner.st_gid)
