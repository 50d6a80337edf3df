"""What ``gpushare release`` says: of a dry run nothing as if it were done."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from world import NOW, TOKEN_A, FakeSlurm, job, running

from slurm_gpushare.cli.backfill import release
from slurm_gpushare.slurm import commands

PLACED = f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n0:1"
PAUSED = f"GS1:c=1;t={TOKEN_A};o=gpu:1;p={NOW - 30}"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A job that was sent to a card, and one that stands still for its neighbour."""
    placed = job("7", tag=PLACED, per_node="gres/shard:v100_1:1", wanted_nodes="n0")
    paused = running("8", "n0", "gres/shard:v100_0:1", tag=PAUSED, state="SUSPENDED")
    found = FakeSlurm([placed, paused], [])
    monkeypatch.setattr(commands, "connect", lambda **_: found)
    return found


def test_a_dry_run_says_what_would_be_done_and_does_nothing(slurm: FakeSlurm) -> None:
    done = CliRunner().invoke(release, ["--dry-run"])
    assert done.output.splitlines() == [
        "8: would go on after its pause",
        "7: would be released Gres=gpu:1 ReqNodeList=",
    ]
    assert (done.exit_code, slurm.written) == (0, [])


def test_what_was_done_is_said_as_done(slurm: FakeSlurm) -> None:
    done = CliRunner().invoke(release, [])
    assert done.output.splitlines() == ["8: goes on after its pause", "7: released Gres=gpu:1 ReqNodeList="]
    assert ("resume", "8") in slurm.written
    assert ("update", "7") in slurm.written
