"""A file system whose server is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextlib.contextmanager
def stopped_file_system(where: Path) -> Iterator[None]:
    """Mounted over FUSE at a directory; nobody answers, and whoever looks there hangs until the end of the block."""
    if os.geteuid() or not Path("/dev/fuse").exists():
        pytest.skip("no FUSE here")
    server, libc = os.open("/dev/fuse", os.O_RDWR), ctypes.CDLL(None, use_errno=True)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"stopped", os.fsencode(where), b"fuse", 0, options.encode()):
        os.close(server)
        pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(where), _MNT_DETACH)
        os.close(server)  # whoever waits gets an error


def left_behind(node_dir: Path) -> set[str]:
    """Processes that epilogs have left in a file system that hangs: they have the lock of those that copy from it."""
    found, lock = set(), (node_dir / "board.lock").stat()
    for file in Path("/proc").glob("[0-9]*/fd/9"):
        with contextlib.suppress(OSError):
            if os.path.samestat(file.stat(), lock):
                found.add(file.parts[2])
    return found
