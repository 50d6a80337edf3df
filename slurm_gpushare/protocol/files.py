"""Files that are written whole or not at all: a draft beside the file, then a rename over it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o644, *, sync: bool = False) -> Iterator[Path]:
    """An empty draft for the caller to fill. It takes the place of `path` when the block ends well, else it is removed.

    With `sync` the contents are on disk before the rename, so that a crash leaves the old file or the new one.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        draft.chmod(mode)  # whatever the umask
        yield draft
        if sync:
            with draft.open("rb") as file:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(path: Path, text: str, mode: int = 0o644, *, sync: bool = False) -> None:
    """Make `text` the contents of `path`."""
    with replacing(path, mode, sync=sync) as draft:
        draft.write_text(text, encoding="utf-8")


def overwrite_line(path: Path, text: str) -> None:
    """Write one line in place, in one call, so that a reader never sees half of it; blank what a longer line left.

    In place, since a client of NFS asks the server again when it opens a file that it knows, while a new name may stay
    hidden from it for half a minute.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        line = f"{text}\n".encode("ascii")
        os.pwrite(handle, line.ljust(os.fstat(handle).st_size, b"\n"), 0)
    finally:
        os.close(handle)


# Files that root makes for SlurmUser: an administrator's command must not lock the helper out of its own files.


def hand_over(path: Path) -> None:
    """Give what root has just made to the owner of the directory it is in; for anybody else it is theirs already."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def make_open_dir(path: Path, mode: int = 0o755) -> None:
    """A directory that its owner writes and everybody may enter, whatever the umask; one that is there stays as it is.

    Everybody may list it too, unless `mode` says otherwise.
    """
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        hand_over(path)


# Where the files live that are not Python: Lua, SQL, prolog scripts, units, man pages.


def resource_dir(name: str) -> Path:
    """The directory of ``lua_bridge``, ``prolog``, ``share`` or ``sql``, in a checkout or an installed wheel.

    Daemons outside Python read these files, so they must be real paths; wheels are always
    unpacked on installation, which makes them so.
    """
    return Path(str(files(f"slurm_gpushare.{name}")))
