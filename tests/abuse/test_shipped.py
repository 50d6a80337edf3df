"""The testbed is the product as shipped: SlurmUser is nobody special, and our directories have the documented modes."""

from __future__ import annotations

import pwd
import stat
from collections.abc import Callable
from pathlib import Path

from gpushare_lab.testbed.testbed import Testbed


def owner_and_mode(path: Path) -> tuple[str, str]:
    status = path.stat()
    return pwd.getpwuid(status.st_uid).pw_name, f"{stat.S_IMODE(status.st_mode):o}"


def for_all_to_read(path: Path) -> bool:
    """The copy of gpushare.conf, as gpushare.conf is, and what the helper publishes."""
    return path.name == "gpushare.conf.good" or "public" in path.parts


def test_slurmctld_and_slurmdbd_run_as_an_ordinary_system_user(testbed: Testbed) -> None:
    uid = pwd.getpwnam(testbed.slurm_user).pw_uid
    assert uid != 0
    pids = testbed.running()
    for name in ("slurmctld", "slurmdbd"):
        assert Path(f"/proc/{pids[name]}").stat().st_uid == uid
    assert Path(f"/proc/{pids['slurmd-gpu0']}").stat().st_uid == 0


def test_our_directories_have_the_documented_owners_and_modes(testbed: Testbed) -> None:
    ours = testbed.layout.gpushare
    assert owner_and_mode(ours / "state") == ("slurm", "711")
    assert owner_and_mode(ours / "spool") == ("slurm", "711")
    assert owner_and_mode(ours / "spool" / "incoming") == ("slurm", "1733")


def test_what_root_makes_for_the_helper_is_the_helpers(testbed: Testbed) -> None:
    testbed.run(["gpushare", "db", "migrate"])
    testbed.run(["gpushare", "backfill", "--once"])
    testbed.run(["gpushare", "backfill", "--once"], user=testbed.slurm_user)
    for path in testbed.layout.gpushare.rglob("*"):
        owner, mode = owner_and_mode(path)
        assert owner == testbed.slurm_user, path
        if path.is_file():
            assert mode == ("644" if for_all_to_read(path) else "600"), path


def test_a_user_can_neither_read_nor_change_what_is_ours(
    testbed: Testbed, verdict: Callable[[str, str, str], None]
) -> None:
    testbed.run(["gpushare", "db", "migrate"])
    testbed.run(["gpushare", "backfill", "--once"])
    user = pwd.getpwnam("games")
    theirs, written, read = set(), set(), set()
    for path in testbed.layout.gpushare.rglob("*"):
        status = path.stat()
        if status.st_uid == user.pw_uid:
            theirs.add(path.name)
        if status.st_mode & 0o022 and path.name != "incoming":
            written.add(path.name)
        if path.is_file() and status.st_mode & 0o044 and not for_all_to_read(path):
            read.add(path.name)
    verdict("reading or changing files of ours", "nothing of the user's, to write or to read",
            "nothing of the user's, to write or to read" if not theirs | written | read
            else f"{sorted(theirs)} {sorted(written)} {sorted(read)}")  # fmt: skip
