"""Records on their way to the controller: one file each, complete or not there at all, its author proven.

A file's content is a munge credential around the record. Munge says which uid made it, which file ownership
cannot: NFS with root_squash gives root's files to nobody. What cannot be left now waits on the node.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import hand_over, replace_text, replacing
from slurm_gpushare.protocol.record import Record, RecordError, RecordKind, encode_record, parse_record
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.settings_in_force import last_good_path

NODES = "nodes"
"""Where root of the nodes leaves records: SlurmUser's directory, so that no user can fill it or make ticks by it."""
INCOMING = "incoming"
"""Where users leave theirs, and nodes whose root the file server takes for nobody."""
REJECTED = "rejected"
SUFFIX = ".rec"
# Anyone may add a file, only its owner and ours may remove one, and nobody else can list them.
INCOMING_MODE = 0o1733
_RELAY_RETRY_S = 10.0


def hold_dir(spool_dir: Path) -> Path:
    """Where the helper tells the nodes whether to hold a card that becomes empty; only SlurmUser writes there."""
    return spool_dir / "hold"


class SpoolError(GpushareError):
    """A record could not be left in the spool directory."""


def spool_name(record: Record) -> str:
    """``gpu0-4711-<run>-i.rec``. An interim record replaces its run's last one, should that still be waiting."""
    return f"{record.node}-{record.job_id}-{record.run_id}-{'f' if record.kind is RecordKind.FINAL else 'i'}{SUFFIX}"


def seal(line: str, munge_socket: Path | None = None, reader_uid: int | None = None) -> str:
    """`line` as a munge credential of the user of this process. With `reader_uid`, only that user can open it."""
    only = [] if reader_uid is None else [f"--restrict-uid={reader_uid}"]
    argv = ["munge", *([f"--socket={munge_socket}"] if munge_socket else []), *only]
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
    credential = seal(encode_record(record), config.munge_socket)
    argv = [sys.executable, "-m", "slurm_gpushare.store.spool"]
    try:
        done = subprocess.run(argv, input=credential, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise SpoolError(f"StoreUrl: {type(error).__name__}") from error
    if done.returncode:
        raise SpoolError(f"StoreUrl: {done.stderr.strip()[-300:]}")


def write_record(record: Record, spool_dir: Path, munge_socket: Path | None = None) -> Path:
    """Leave the record in the spool, by rename; a failure leaves nothing behind, and no directory is made."""
    credential = seal(encode_record(record), munge_socket)
    failure = OSError()
    for directory in (spool_dir / NODES, spool_dir / INCOMING):
        path = directory / spool_name(record)
        try:
            with replacing(path, 0o600, sync=True) as draft:  # ingest takes *.rec only
                draft.write_text(credential, encoding="ascii")
                _let_reader_read(draft)
            if record.kind is RecordKind.FINAL:
                path.with_name(path.name.replace(f"-f{SUFFIX}", f"-i{SUFFIX}")).unlink(missing_ok=True)
        except OSError as error:
            failure = error
        else:
            return path
    raise SpoolError(f"{directory}: {failure.strerror}", "Is SpoolDir there, writable and not full?") from failure


def _let_reader_read(path: Path) -> None:
    """Root gives the record to the owner of the spool, and nobody else can read it then.

    A user cannot, and neither can root where the file server squashes it: nobody can list the directory, and the name
    is random.
    """
    with suppress(OSError):
        hand_over(path)
        if os.geteuid() == 0:
            return
    path.chmod(0o644)


class OrderRelay:
    """A child that brings the node's stop orders from the database to a file, for all samplers of the node at once.

    It ends with the sampler that has started it, and another one's takes its place.
    """

    def __init__(self, node: str, path: Path) -> None:
        self._argv = [sys.executable, "-m", "slurm_gpushare.store.spool", node, str(path)]
        self._path, self._lock_path = path, path.with_name(f"{path.name}.lock")
        self._lock: IO[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._next_s = 0.0

    def keep(self, wanted: bool) -> None:
        """Have one of the node's samplers run it while it is `wanted`. One that fails is started anew after a while."""
        if not wanted:
            self.close()
        elif time.monotonic() >= self._next_s and (self._child is None or self._child.poll() is not None):
            self.close()
            self._next_s = time.monotonic() + _RELAY_RETRY_S
            try:
                self._lock = self._lock_path.open("w")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # another sampler's brings them, or none can
            self._path.unlink(missing_ok=True)  # it may be of long ago
            self._child = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """End it, and let another sampler's take its place."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._child.kill()
            self._child.wait()
        if self._lock is not None:
            self._lock.close()
        self._child = self._lock = None


class Undelivered:
    """Final records that a node could not leave anywhere: root's, at most so many, and still there after a reboot."""

    MOST = 1000

    def __init__(self) -> None:
        self._directory = last_good_path().parent / "undelivered"

    def keep(self, record: Record) -> None:
        """Take a record's place here, in place of the oldest if there are too many. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._waiting()[: -self.MOST + 1]:
            path.unlink(missing_ok=True)
        replace_text(self._directory / spool_name(record), encode_record(record), 0o600, sync=True)

    def drop(self, record: Record) -> None:
        """It has been left after all."""
        (self._directory / spool_name(record)).unlink(missing_ok=True)

    def deliver(self, config: Config, most: int = 20) -> None:
        """Leave so many of those that wait, the oldest first; raises SpoolError where that cannot be yet."""
        for path in self._waiting()[:most]:
            try:
                record = parse_record(path.read_bytes())
            except FileNotFoundError:
                continue  # another sampler was faster
            except RecordError:
                path.unlink(missing_ok=True)
                continue
            send_record(record, config)
            path.unlink(missing_ok=True)

    def _waiting(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
