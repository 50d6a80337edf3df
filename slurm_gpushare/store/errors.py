"""What can be wrong with a store, each as one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.store.journal import journal_fix


class StoreError(GpushareError):
    """The store cannot be used; the message says which one and why."""


class StoreReplaced(StoreError):
    """The store's file was deleted, or another one took its place: what was read from it no longer counts."""


class StoreDamaged(StoreError):
    """The store's file is not what SQLite wrote: only a copy of it helps."""


NOT_THE_OWNER = "Run this as SlurmUser, who must own it and its directory."
RESTORE = "Restore the last 'gpushare db backup'."


def explained(error: Exception, where: str, path: Path | None) -> StoreError:
    """The driver's `error` for people. `where` is the store's address, `path` its file if it has one."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause.args[-1] if getattr(cause, "args", None) else cause)
    for sign, what, hint in _KNOWN:
        if sign in text.lower():
            kind = StoreDamaged if sign in _DAMAGE else StoreError
            fix = journal_fix(path) if path and sign in _BY_THE_JOURNAL else None
            return kind(f"{where}: {what}", f"Run as root: {fix}" if fix else hint)
    return StoreError(f"{where}: {text}")


_KNOWN = (
    ("unable to open", "cannot be opened", "Check that the file exists and that this user may read and write it."),
    ("readonly", "cannot be written", NOT_THE_OWNER),
    ("locked", "locked by another process for too long", "See who holds it with: fuser -v FILE."),
    ("not a database", "is not an SQLite database, or is damaged", RESTORE),
    ("malformed", "is damaged", RESTORE),
    ("is full", "the disk is full", "Free some space; nothing was lost: records wait in the spool directory."),
    ("disk i/o", "the disk reports an error", "Look at the kernel's log."),
    ("access denied", "the database refuses this user or password", "Check StoreUrl."),
    ("unknown database", "no such database", "Create it, or correct StoreUrl."),
    ("can't connect", "no database server answers there", "Check StoreUrl and that the server runs."),
    ("no such table", "holds no gpushare store", "Make it with: gpushare db migrate."),
    ("doesn't exist", "holds no gpushare store", "Make it with: gpushare db migrate."),
)
_DAMAGE = frozenset({"not a database", "malformed"})
_BY_THE_JOURNAL = frozenset({"unable to open", "readonly"})
"""What SQLite also says where the store itself could be used, and the files beside it cannot."""
