"""The files that SQLite keeps beside a store while it is open: ``-wal`` and ``-shm``.

Whoever opens the store first makes them, with the mode that the store has at that moment, and a reader who cannot write
leaves them behind. If they are then another user's, or for reading only, the helper cannot write its own store.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

WAL, SHM = "-wal", "-shm"


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def remove_journal(path: Path) -> None:
    """Of a store that nobody has open any more."""
    for suffix in (WAL, SHM):
        beside(path, suffix).unlink(missing_ok=True)


def may_open(path: Path) -> bool:
    """Whether this user may open the store without making files that lock its owner out."""
    if os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid() or beside(path, SHM).exists():
        return True
    return not os.access(path, os.R_OK)  # SQLite refuses then before it makes any


def mend_own(path: Path) -> None:
    """Open files of this user's as far as the store is: one that was read-only for a while leaves them read-only."""
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        for file, about in _found(path):
            if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode) and mode & ~about.st_mode:
                file.chmod(mode)


def journal_fix(path: Path) -> str | None:
    """The command, for root, after which the files are the owner's alone again; None if they are.

    It may be run while the store is open.
    """
    try:
        store = path.stat()
        bad = {file: about for file, about in _found(path) if not _fits(about, store)}
    except OSError:
        return None  # not this user's to see
    if strange := [file for file, about in bad.items() if not stat.S_ISREG(about.st_mode)]:
        # SQLite makes no such thing, and root's chown would follow a link to whatever it names.
        return f"rm -d {_words(strange)}"
    like = f"--reference={shlex.quote(str(path))}"
    return f"chown {like} {_words(bad)}; chmod {like} {_words(bad)}" if bad else None


def _words(files: Iterable[Path]) -> str:
    return " ".join(shlex.quote(str(file)) for file in files)


def _found(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for suffix in (WAL, SHM):
        with suppress(FileNotFoundError):
            yield beside(path, suffix), beside(path, suffix).lstat()


def _fits(file: os.stat_result, store: os.stat_result) -> bool:
    """Whether the store's owner may do as much with the file as with the store, and others no more."""
    missing = store.st_mode & 0o600 & ~file.st_mode
    too_open = file.st_mode & 0o077 & ~store.st_mode
    return stat.S_ISREG(file.st_mode) and file.st_uid == store.st_uid and not missing and not too_open
