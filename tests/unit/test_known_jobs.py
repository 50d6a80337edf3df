"""Slurm gives ids anew and forgets a requeued job's first submission; the store does neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, BOB, NOW, TOKEN_A, TOKEN_B, FakeSlurm, Flat, job, node, running

from slurm_gpushare.helper.pairs import follow, past_spans
from slurm_gpushare.helper.publishing import own_figures
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.history import Decision, Span, StoredJob
from slurm_gpushare.protocol.settings import SitePromises, parse_config
from slurm_gpushare.report.job_view import views_of
from slurm_gpushare.report.sources import StoreSource
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.store import Store
from slurm_gpushare.store.published import PublicJob

TAG = f"GS1:c=2;t={TOKEN_A};o=gpu:1"


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with Store.create(store_url) as store:
        yield store


def rows(store: Store, job_id: int = 8) -> list[tuple[int, int, int | None, str]]:
    """Owner, first submission, end and tag of all jobs that had this id."""
    return [
        (item.uid, item.first_submit_s, item.end_s, item.tag) for item in store.jobs.of_ids({job_id}).get(job_id, [])
    ]


def look(store: Store, *jobs: object, at_s: int = NOW) -> dict[str, StoredJob]:
    return follow(store, jobs, None, at_s)  # type: ignore[arg-type]


def test_a_requeued_job_is_one_job_with_its_first_submission(store: Store) -> None:
    look(store, running("8", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 500))
    look(store, job("8", uid=ALICE, tag=TAG, submit_s=NOW - 10, restarts=1))
    assert rows(store) == [(ALICE, NOW - 500, None, TAG)]
    look(store, at_s=NOW + 60)
    assert rows(store) == [(ALICE, NOW - 500, NOW + 60, TAG)]
    look(store, job("8", uid=ALICE, tag=TAG, submit_s=NOW + 70, restarts=2), at_s=NOW + 80)
    assert rows(store) == [(ALICE, NOW - 500, None, TAG)], "put back after its end"


def test_a_helper_that_starts_anew_goes_on_with_what_the_store_has(store: Store, store_url: str) -> None:
    look(store, job("8", uid=ALICE, tag=TAG, submit_s=NOW - 500))
    with Store(store_url) as again:
        look(again, job("8", uid=ALICE, submit_s=NOW - 500))
        assert rows(again) == [(ALICE, NOW - 500, None, TAG)], "and knows the tag that somebody has replaced"


def test_an_id_that_is_used_again_is_another_job(store: Store) -> None:
    look(store, running("8", "n0", "gres/shard:v100_0:1", uid=BOB, tag=TAG, submit_s=NOW - 500))
    look(store, job("8", uid=ALICE, tag=TAG, submit_s=NOW - 10))
    assert rows(store) == [(BOB, NOW - 500, NOW, TAG), (ALICE, NOW - 10, None, TAG)]
    look(store, job("8", uid=ALICE, tag=TAG, submit_s=NOW + 5), at_s=NOW + 6)
    assert len(rows(store)) == 3, "of the same user too"


def test_waiting_tasks_of_an_array_keep_apart_when_they_start(store: Store) -> None:
    look(store, *(job(f"8_{task}", uid=ALICE, tag=TAG, submit_s=NOW - 50) for task in range(3)))
    started = running("8_0", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 50, raw_id=9)
    look(store, started, *(job(f"8_{task}", uid=ALICE, tag=TAG, submit_s=NOW - 50) for task in (1, 2)))
    assert [item.job_key for item in store.jobs.of_ids({9})[9]] == ["8_0"]
    assert sorted(item.job_key for item in store.jobs.of_ids({8})[8]) == ["8_1", "8_2"]


@pytest.fixture
def reused(store: Store) -> Store:
    """Bob's job 8 shared with job 7 for 100 s; then Slurm gave its id to Alice's."""
    look(store, running("8", "n0", "gres/shard:v100_0:1", uid=BOB, tag=TAG, submit_s=NOW - 5000))
    store.sharing.begin([Span(7, 8, TOKEN_B, TOKEN_A, "n0", 0, "V100", NOW - 4900, None, 0.8, 0.5)])
    store.sharing.end({span.id: NOW - 4800 for span in store.sharing.open()})
    store.decisions.add([Decision(8, NOW - 4950, "beside", "n0", 0, 7, 0.5)])
    look(store, at_s=NOW - 4700)
    return store


def test_nobody_is_charged_for_what_another_job_of_the_same_id_lost(reused: Store) -> None:
    mine = running("8", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 60)
    known = look(reused, mine)
    assert past_spans(reused, FakeSlurm(), [mine], NOW, known=known) == []


def test_a_node_whose_clock_is_5_s_behind_loses_no_span(store: Store) -> None:
    mine = running("8", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 60)
    known = look(store, mine)
    store.sharing.begin([Span(7, 8, TOKEN_B, TOKEN_A, "n0", 0, "V100", NOW - 65)])
    store.sharing.end({span.id: NOW - 5 for span in store.sharing.open()})
    assert len(past_spans(store, FakeSlurm(), [mine], NOW, known=known)) == 1


def test_a_user_never_sees_the_sharing_of_another_users_job_of_the_same_id(reused: Store, tmp_path: Path) -> None:
    look(reused, running("8", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 60))
    told = own_figures(reused, ALICE, [PublicJob("8", 8)], NOW, {})
    assert (told.spans, told.decisions) == ((), ())
    history = StoreSource(reused, tmp_path).of_job(8, "8", ALICE)
    assert (list(history.spans), list(history.decisions)) == ([], [])
    assert len(StoreSource(reused, tmp_path).of_job(8, "8", BOB).spans) == 1


class TestTagsThatAreGone:
    """Other tools write AdminComment too."""

    @pytest.fixture
    def helper(self, store: Store, store_url: str, tmp_path: Path) -> Helper:
        config = parse_config(f"Partitions=gpu\nStoreUrl={store_url}\nSpoolDir={tmp_path}\nStateDir={tmp_path}\n")
        self.slurm = FakeSlurm([], [node()])
        return Helper(config, self.slurm, store, Flat(), clock=lambda: NOW)

    def test_they_are_written_again_behind_what_the_other_wrote(self, helper: Helper) -> None:
        waits, runs = job("8", tag=TAG), running("9", "n0", "gres/shard:v100_0:1", tag=TAG)
        self.slurm.now_has([waits, runs])
        helper.tick()
        self.slurm.now_has([replace(item, admin_comment="a note", tag=None) for item in (waits, runs)])
        helper.tick()
        assert {item.admin_comment.partition(" GS1:")[0] for item in self.slurm.queue.values()} == {"a note"}
        assert all(item.tag and item.tag.token == TOKEN_A for item in self.slurm.queue.values())

    def test_not_where_the_owner_took_the_job_out(self, helper: Helper) -> None:
        out = running("9", "n0", "gres/shard:v100_0:1", tag=TAG, per_job="gres/gpu:1")
        self.slurm.now_has([out])
        helper.tick()
        assert self.slurm.queue["9"].tag is None
        self.slurm.written.clear()
        helper.tick()
        assert self.slurm.written == []


def test_a_report_gives_each_job_of_an_id_its_own(reused: Store) -> None:
    look(reused, running("8", "n0", "gres/shard:v100_0:1", uid=ALICE, tag=TAG, submit_s=NOW - 60))
    known = StoreSource(reused, Path()).between(NOW - 6000, NOW)
    new = AccountedJob(
        8, "8", "c", ALICE, "alice", "acc", "gpu", "RUNNING", NOW - 60, NOW - 60, NOW - 50, None, 50, None, 1,
        ("n0",), 0, 1, None,
    )  # fmt: skip
    old = replace(new, uid=BOB, state="COMPLETED", submit_s=NOW - 5000, start_s=NOW - 4950, end_s=NOW - 4750)
    for accounted, stays in ((new, 0), (old, 1)):
        (view,) = views_of([accounted], known, SitePromises(25, 50), NOW)
        assert len(view.stays) == stays
