"""Faults of our own files: the store, the hook's file, the settings."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from gpushare_lab.chaos.fault import Pause
from gpushare_lab.chaos.site import ChaosSite

ROOM_KIB = 16
"""What is left on a full disk: enough for a transaction to begin."""
FULL = "the disk is full"


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


def full_disk(site: ChaosSite, pause: Pause) -> None:
    """The store lies on a small file system of its own, and that fills up: a transaction finds no room half-way.

    The shell does it inside the testbed, since one of another Debian has mounts of its own.
    """
    store, small = site.store_path, site.testbed.dir / "small-disk"
    size_kib = 2 * store.stat().st_size // 1024 + 8192
    site.stop_helper()
    _shell(
        site,
        f"""
mkdir {small}
mount -t tmpfs -o size={size_kib}k,mode=755 small {small}
chown --reference={store.parent} {small}
cp -p {store}* {small}
rm {store}*
ln -s {small}/{store.name} {store}""",
    )
    try:
        site.start_helper()
        site.wait_alive()
        said_before = site.log.read_text().count(FULL)
        _shell(
            site,
            f"""
dd if=/dev/zero of={small}/ballast bs=4k 2>/dev/null || :
truncate -s -{ROOM_KIB}K {small}/ballast""",
        )
        pause(20)
        said = site.log.read_text().count(FULL) - said_before
        _shell(site, f"rm {small}/ballast")
        if not said:
            raise AssertionError("no transaction found the disk full")
        pause(8)
    finally:
        site.stop_helper()
        _shell(site, f"rm {store}; cp -p {small}/{store.name}* {store.parent}; umount {small}; rmdir {small}")
        site.start_helper()


def _shell(site: ChaosSite, script: str) -> None:
    site.testbed.run(["sh", "-ec", script])


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
