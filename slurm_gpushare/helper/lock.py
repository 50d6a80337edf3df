"""One helper at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import hand_over


class Lock:
    """An flock on ``StateDir/backfill.lock``: it ends with the process, however that ends."""

    def __init__(self, directory: Path, hint: str = "One is enough.") -> None:
        """`hint` says what to do while a helper holds it."""
        self._path = directory / "backfill.lock"
        self._hint = hint
        self._handle = -1

    def __enter__(self) -> Lock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # SlurmUser's alone: whoever can open it can hold the lock.
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            hand_over(self._path)
        except OSError as why:
            raise GpushareError(
                f"{self._path}: {why.strerror}", "StateDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise GpushareError(f"a helper runs already, with process id {holder}", self._hint) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())
        return self

    def is_held(self) -> bool:
        """Whether the file that we have locked is still the one that others would lock."""
        try:
            ours, there = os.fstat(self._handle), self._path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)
