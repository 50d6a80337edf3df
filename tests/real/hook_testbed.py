"""What the tests of the hook need on a testbed: a hook file, users' jobs, placements as the helper makes them."""

from __future__ import annotations

import os
import pwd
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.configuration import version, with_keys
from gpushare_lab.testbed.daemons import wait_until
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.tag import Tag, parse_tag

USER = "games"
KNOWN = "gs-" + "k" * 20
OTHERS = "gs-" + "o" * 20
UNKNOWN = "gs-" + "u" * 20


_last_written: list[tuple[str, int | None]] = []
"""The test file and the CPUs of the last hook.sqlite that was written here."""


def write_hook_file(testbed: Testbed, *, workloads: int = 0, cpus: int | None = None) -> Path:
    """hook.sqlite with a workload of USER's and one of somebody else's, written by a helper that is alive.

    The hook may keep the last file open for two seconds. That matters only where the next says something else: where
    it has other CPUs, or where tests of another file, which know other workloads, have just ended.
    """
    path = testbed.layout.gpushare / "hook.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as file, file:
        file.executescript("PRAGMA synchronous=OFF; BEGIN;" + (resource_dir("sql") / "hook.sql").read_text())
        owner, other = pwd.getpwnam(USER).pw_uid, pwd.getpwnam("nobody").pw_uid
        rows = [(KNOWN, owner, "v100=2", cpus), (OTHERS, other, "v100=1", None)]
        rows += [
            (f"gs-{index:020d}".translate(str.maketrans("0189", "abcd")), 1, "v100=1", None)
            for index in range(workloads)
        ]
        file.executemany("INSERT OR IGNORE INTO workload VALUES (?, ?, ?, ?)", rows)
        file.execute("UPDATE helper SET heartbeat_s = ?", (int(time.time()),))
    test_file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if _last_written != [(test_file, cpus)]:
        testbed.wait_for_hook()
        _last_written[:] = [(test_file, cpus)]
    return path


def set_conf(testbed: Testbed, **keys: str) -> None:
    """Change gpushare.conf under a running slurmctld; the hook sees it in the next second of the clock."""
    path = testbed.layout.gpushare_conf
    path.write_text(with_keys(path.read_text(), keys))
    written_s = int(time.time())
    wait_until(lambda: time.time() >= written_s + 1, 3)


@dataclass(frozen=True)
class Submitted:
    """The answer to one sbatch."""

    job_id: int
    said: str
    """Our lines on sbatch's stderr."""

    def tag(self, testbed: Testbed) -> Tag | None:
        return parse_tag(show(testbed, self.job_id).get("AdminComment", ""))


def sbatch(
    testbed: Testbed, *options: str, token: str | None = KNOWN, script: str = "true", user: str = USER
) -> Submitted:
    comment = [f"--comment=gpushare:{token}"] if token else []
    home = testbed.layout.home / user
    argv = ["sbatch", "--parsable", "--output=/dev/null", *comment, *options]
    # A command of the user's, so that its home exists before it is the working directory.
    testbed.run(["true"], user=user)
    done = testbed.run(argv, user=user, input=f"#!/bin/sh\n{script}\n", cwd=home)
    return Submitted(int(re.split(r"[;\n]", done.stdout)[0]), done.stderr)


def refused(testbed: Testbed, *argv: str, user: str = USER) -> str:
    """The error of a command that must fail."""
    done = testbed.run(list(argv), user=user, check=False, input="#!/bin/sh\ntrue\n")
    assert done.returncode != 0, done.stdout
    return done.stderr


def is_old(testbed: Testbed) -> bool:
    """A release on which single GPUs are asked for as all shards of one."""
    return version(testbed.release) < (23, 11)


def prefix(testbed: Testbed) -> str:
    return "gres:" if is_old(testbed) else "gres/"


def place(testbed: Testbed, job_id: int | str, index: int, node: str) -> int:
    """Put a pending job on one card, as the helper does; returns the card's index.

    On 22.05 a job stays with the index that the hook gave it: when a job that was moved to another index ends,
    that release takes one of the old index's shards for used for ever.
    """
    typed = re.search(r"shard:v100_(\d+):\d+", show(testbed, job_id)["TresPerNode"])
    if typed:
        index = int(typed.group(1))
    request = [f"Gres=shard:v100_{index}:1", f"ReqNodeList={node}", "StartTime=now"]
    testbed.run(["scontrol", "update", f"JobId={job_id}", *request])
    return index


@contextmanager
def node_features(testbed: Testbed, **features: str) -> Iterator[None]:
    """Other features of some nodes for a while."""

    def write(node: str, names: str) -> None:
        testbed.run(["scontrol", "update", f"NodeName={node}", f"AvailableFeatures={names}", f"ActiveFeatures={names}"])

    for node, names in features.items():
        write(node, names)
    try:
        yield
    finally:
        for node in features:
            write(node, "v100")


def hook_log(testbed: Testbed) -> list[str]:
    """Our lines in slurmctld's log."""
    text = (testbed.layout.log / "slurmctld.log").read_text(errors="replace")
    return [line for line in text.splitlines() if "gpushare:" in line]


def home_of(testbed: Testbed, user: str = USER) -> Path:
    testbed.run(["true"], user=user)
    return testbed.layout.home / user


def owned_directory(path: Path, user: str = USER) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid)
    return path
