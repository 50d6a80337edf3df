"""Root file systems of other Debian releases, for the Slurm releases in them; made once, kept in a cache."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpushare_lab.testbed.daemons import last_lines
from gpushare_lab.testbed.scripts import write_executable
from slurm_gpushare.protocol.errors import BadInput, GpushareError

Progress = Callable[[str], None]
Step = Callable[[list[str], Path], None]


@dataclass(frozen=True)
class Suite:
    """A Debian release, the Slurm in it, and the debootstrap script that can make it."""

    name: str
    slurm: str
    script: str


SUITES = {
    suite.name: suite
    for suite in (
        Suite("bookworm", "22.05", "bookworm"),
        Suite("trixie", "24.11", "trixie"),
        Suite("forky", "26.05", "sid"),  # the debootstraps of older releases have no script for it
    )
}
# Slurm, and what our own Python code needs when it runs in jobs and prologs there.
PACKAGES = [
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin"),
    *("munge", "lua-sql-sqlite3"),
    *("python3", "python3-click", "python3-numpy", "python3-psutil", "python3-sqlalchemy", "python3-pymysql"),
    "python3-sklearn",
]
_STAMP = ".gpushare-complete"  # last file to be written; holds what was installed
_OVERLAID = ("hosts", "hostname", "passwd", "group")  # in /etc: mount points for the machine's own


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where root file systems are kept: outside any repository; ``GPUSHARE_CACHE`` overrides."""
    if explicit := environ.get("GPUSHARE_CACHE"):
        return Path(explicit).absolute()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slurm-gpushare"


def host_suite() -> str:
    """The Debian release of this machine, whose packages need no root file system."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def check_suite(name: str) -> str:
    if name not in SUITES:
        raise BadInput(f"testbed: no Debian release '{name}' is known", f"Choose one of {', '.join(SUITES)}.")
    return name


def is_complete(root: Path) -> bool:
    try:
        return (root / _STAMP).read_text().split() == PACKAGES
    except FileNotFoundError:
        return False


def root_of(name: str, progress: Progress, env: Mapping[str, str] | None = None) -> Path:
    """The root file system of a suite, made now if the cache has none; a half-built one is never used.

    `env` marks the processes that make it, so that they are found if we are killed meanwhile.
    """
    root = cache_dir() / name
    if is_complete(root):
        return root
    with _one_builder(root, progress) as lock:
        if not is_complete(root):
            _build(SUITES[name], root, progress, partial(_step, env={**os.environ, **(env or {})}, lock=lock))
    return root


def _build(suite: Suite, root: Path, progress: Progress, step: Step) -> None:
    if shutil.which("debootstrap") is None:
        raise GpushareError(
            f"testbed: Slurm {suite.slurm} needs a Debian {suite.name}, and debootstrap to make one is not installed",
            "Run 'apt-get install debootstrap'.",
        )
    mirror = os.environ.get("GPUSHARE_DEBIAN_MIRROR", "http://deb.debian.org/debian")
    part, log = root.with_name(f"{root.name}.part"), root.with_name(f"{root.name}.log")
    log.unlink(missing_ok=True)
    _remove(part)  # of a build that was killed
    try:
        part.mkdir()
        progress(f"Debian {suite.name}: base system from {mirror} (once; some minutes)")
        script = f"/usr/share/debootstrap/scripts/{suite.script}"
        step(["debootstrap", "--variant=minbase", suite.name, str(part), mirror, script], log)
        write_executable(part / "usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n")  # no daemon starts on installation
        progress(f"Debian {suite.name}: Slurm {suite.slurm}")
        apt = ["chroot", str(part), "apt-get", "-qq", "-o", "Acquire::Check-Valid-Until=false"]
        step([*apt, "update"], log)
        step([*apt, "install", "-y", "--no-install-recommends", *PACKAGES], log)
        for waste in ("var/lib/apt/lists", "var/cache/apt/archives", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(part / waste, ignore_errors=True)
        for name in _OVERLAID:
            (part / "etc" / name).touch()
        (part / _STAMP).write_text(" ".join(PACKAGES) + "\n")
        _remove(root)  # of another package list
        part.rename(root)
    except OSError as why:
        raise GpushareError(f"testbed: Debian {suite.name}: {why}") from why
    finally:
        _remove(part)


def _step(argv: list[str], log: Path, env: Mapping[str, str], lock: int) -> None:
    with log.open("ab") as out:
        code = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**env, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            pass_fds=[lock],  # if we are killed, nobody else builds until this has ended too
            check=False,
        ).returncode
    if code:
        raise GpushareError(f"testbed: {argv[0]}: exit {code}: {last_lines(log, 3)}", f"See {log}.")


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


@contextmanager
def _one_builder(root: Path, progress: Progress) -> Iterator[int]:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        lock = root.with_name(f"{root.name}.lock").open("w")
    except OSError as why:
        raise GpushareError(f"testbed: cache: {why}", "Set GPUSHARE_CACHE to a directory with 1 GB of space.") from why
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Debian {root.name}: waiting for another process that makes it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
