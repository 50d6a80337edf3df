"""A paused job that its owner wakes up: found by what its node measured, and not paused again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, NOW, Site, record, running, token

from slurm_gpushare.helper.pauses import resume
from slurm_gpushare.helper.profile_check import ConductWatch, PauseCheck
from slurm_gpushare.protocol.record import Period, Record, RecordKind, Stat
from slurm_gpushare.protocol.tag import Paused, Tag, parse_tag
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job

A = token(1)
SINCE = int(NOW) - 100
STOPPED = f"GS1:c=1;t={A};o=gpu:1;p={SINCE}s"


def interim(seq: int, end_s: float, *means: float, run_id: str = "a" * 32) -> Record:
    """The record of a shared run after `means`, each over sixty samples."""
    n = 60 * len(means)
    stat = Stat(n, max(means), sum(means) / len(means), min(means), max(means), 0.0)
    return replace(
        record(7, shared=True),
        kind=RecordKind.INTERIM, run_id=run_id, seq=seq, end_s=end_s, shared=Period(0.0, 30.0, {"proc_sm_pct": stat}),
    )  # fmt: skip


def paused_job(state: str = "STOPPED", tag: str = STOPPED) -> Job:
    return replace(running("7", "n0", "gres/shard:v100_0:1", tag=tag, uid=ALICE), state=state)


def test_only_what_was_done_in_the_pause_counts() -> None:
    check = PauseCheck()
    paused = {7: SINCE}
    assert check.look([interim(1, SINCE - 1, 90.0)], paused) == {}
    assert check.look([interim(2, SINCE + 20, 90.0, 60.0)], paused) == {}, "a part of it was before the pause"
    assert check.look([interim(3, SINCE + 50, 90.0, 60.0, 0.0)], paused) == {}, "it stands still"
    assert check.look([interim(4, SINCE + 80, 90.0, 60.0, 0.0, 40.0)], paused) == {7: pytest.approx(20.0)}


def test_another_pause_and_another_run_begin_anew() -> None:
    check = PauseCheck()
    check.look([interim(1, SINCE + 20, 0.0)], {7: SINCE})
    assert check.look([interim(2, SINCE + 90, 0.0, 90.0)], {}) == {}, "it is not paused any more"
    assert check.look([interim(3, SINCE + 290, 0.0, 90.0, 90.0)], {7: SINCE + 200}) == {}
    assert check.look([interim(1, SINCE + 300, 90.0, run_id="b" * 32)], {7: SINCE + 200}) == {}


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags[1] = OwnedToken(A, ALICE)
    site.take(record(1, util=30.0))
    return site


def test_a_job_at_work_in_its_pause_is_a_strike_and_told_of_once(site: Site) -> None:
    watch, job = ConductWatch(site.store), paused_job()
    kinds = []
    for seq in (1, 2, 3):
        noted = watch.look_at_paused([job], [interim(seq, SINCE + 30 * seq, *[80.0] * seq)], {}, NOW)
        kinds.append([decision.kind for decision in noted])
    assert kinds == [[], ["ran-while-paused"], []]
    assert watch.ran_on == {7}
    (one,) = site.store.conduct.strikes_of(ALICE)
    assert (one.token, one.job_id, one.feature, one.seen) == (A, 7, "paused", 80.0)
    watch.look_at_paused([], [], {}, NOW)
    assert watch.ran_on == set(), "jobs that are over are forgotten"


def tag_after_resuming(job: Job, stood_still: bool) -> Tag:
    commands: list[Sequence[str]] = []

    def run(argv: Sequence[str], **_: object) -> str:
        commands.append(argv)
        return ""

    resume(Slurm(run), job, NOW, patient=False, stood_still=stood_still)
    written = next(word for argv in commands for word in argv if word.startswith("AdminComment="))
    tag = parse_tag(written.removeprefix("AdminComment="))
    assert tag is not None
    return tag


@pytest.mark.parametrize(("stood_still", "given_back_s"), [(True, 100), (False, 0)])
def test_no_time_is_given_back_for_a_pause_that_was_none(stood_still: bool, given_back_s: int) -> None:
    tag = tag_after_resuming(paused_job(), stood_still)
    assert (tag.paused, tag.stopped_before_s) == (None, given_back_s)


def test_slurms_clock_stood_still_whatever_the_job_did() -> None:
    suspended = paused_job("SUSPENDED", STOPPED.removesuffix("s"))
    assert suspended.tag is not None
    assert suspended.tag.paused == Paused(SINCE)
    tag = tag_after_resuming(suspended, stood_still=False)
    assert (tag.paused_before_s, tag.stopped_before_s) == (100, 0)
