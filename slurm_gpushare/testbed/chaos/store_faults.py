"""Faults of our own files: the store, the hook's file, the settings."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from slurm_gpushare.testbed.chaos.fault import Pause
from slurm_gpushare.testbed.chaos.site import ChaosSite


def locked(site: ChaosSite, pause: Pause) -> None:
    with closing(sqlite3.connect(site.store_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        pause(30)
        other.execute("ROLLBACK")


def _backup(site: ChaosSite) -> Path:
    copy = site.testbed.layout.home / "backup.sqlite"
    copy.unlink(missing_ok=True)
    with closing(sqlite3.connect(site.store_path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")
    owner = site.store_path.stat()
    os.chown(copy, owner.st_uid, owner.st_gid)
    return copy


def damaged(how: str, site: ChaosSite, pause: Pause) -> None:
    """The helper stands still while the store is copied and damaged, so that the copy has all that it took in."""
    site.signal_helper(signal.SIGSTOP)
    copy = _backup(site)
    size = site.store_path.stat().st_size
    with site.store_path.open("r+b") as file:
        if how == "truncated":
            file.truncate(size // 3)
        else:
            file.seek(0)
            file.write(os.urandom(min(size, 40_000)))
    for name in ("-wal", "-shm"):
        site.store_path.with_name(site.store_path.name + name).write_bytes(b"")
    site.signal_helper(signal.SIGCONT)
    pause(10)
    site.stop_helper()
    site.gpushare("db", "restore", "--yes", str(copy))
    site.start_helper()


def read_only(site: ChaosSite, pause: Pause) -> None:
    site.store_path.chmod(0o400)
    site.store_path.parent.chmod(0o555)
    site.kill_helper()
    pause(15)
    site.store_path.parent.chmod(0o755)
    site.store_path.chmod(0o600)


def deleted(site: ChaosSite, pause: Pause) -> None:
    for name in ("", "-wal", "-shm"):
        site.store_path.with_name(site.store_path.name + name).unlink(missing_ok=True)
    pause(12)


def replaced(site: ChaosSite, pause: Pause) -> None:
    site.signal_helper(signal.SIGSTOP)
    _backup(site).replace(site.store_path)
    site.signal_helper(signal.SIGCONT)
    pause(12)


def hook_file(how: str, site: ChaosSite, pause: Pause) -> None:
    if how == "deleted":
        site.config.hook_file.unlink()
    else:
        site.config.hook_file.write_bytes(os.urandom(20_000))
    pause(12)


def settings(how: str, site: ChaosSite, pause: Pause) -> None:
    conf = site.testbed.layout.gpushare_conf
    good = conf.read_text()
    if how == "away":
        conf.unlink()
    else:
        conf.write_text(good + "Partitoins=gpu\n")
    site.kill_helper()
    pause(12)
    conf.write_text(good)
    site.signal_helper(signal.SIGHUP)
    pause(3)
