"""Owners who took a job out of sharing are told so: at once, after the helper has followed, and when it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from world import NOW, TOKEN_A, FakeSlurm, Flat, job, node

from slurm_gpushare.cli.job import _find
from slurm_gpushare.helper.publishing import KEPT_S, MOST_JOBS, OWN_EVERY_S, STAYS_S, Publisher
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.history import OPTED_OUT, Decision
from slurm_gpushare.protocol.settings import Config, parse_config
from slurm_gpushare.report import sources
from slurm_gpushare.report.export import job_json
from slurm_gpushare.report.job_text import job_lines
from slurm_gpushare.report.job_view import from_queue, with_history
from slurm_gpushare.report.sources import PublishedSource
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store, published
from slurm_gpushare.store.credential import Sealed

OWNER = 1000
TAG = f"GS1:c=1;t={TOKEN_A};o=gpu:1"


class OwnersView:
    """A helper that ticks and publishes, and what an owner then reads."""

    def __init__(self, config: Config, store: Store, queue: list[Job]) -> None:
        self.config, self.store = config, store
        self.now_s, self.slurm = float(NOW), FakeSlurm(queue, [node()], comment="")
        self.restart()

    def restart(self) -> None:
        self._helper = Helper(self.config, self.slurm, self.store, Flat(0.9), clock=lambda: self.now_s)
        self._publisher = Publisher(self.store, self.slurm)

    def tick(self, after_s: float = OWN_EVERY_S) -> None:
        self.now_s += after_s
        self._publisher.publish(self._helper.tick(), self.now_s, self.config)

    def told(self, job: Job, uid: int = OWNER) -> str:
        known = from_queue(job, self.now_s)
        source = PublishedSource(self.config.public_dir, uid, None)
        with patch.object(sources.time, "time", lambda: self.now_s):
            history = source.of_job(known.raw_id, known.key, known.uid)
        view = with_history(known, history, self.config.promises)
        text = " ".join("\n".join(job_lines(view, (), source.note, False)).split())
        assert job_json(view, (), "")["opted_out"] == ("opted out" in text)
        return text


@pytest.fixture
def config(tmp_path: Path) -> Config:
    paths = f"SpoolDir={tmp_path}\nStateDir={tmp_path}\nPublicDir={tmp_path}/public\n"
    return parse_config(f"Partitions=gpu\nGpusPerNode=2\nStoreUrl=sqlite:///{tmp_path}/store.sqlite\n{paths}")


@pytest.fixture
def unsealed(tmp_path: Path) -> Iterator[None]:
    with (
        patch.object(published, "seal", lambda text, socket, reader_uid: text),
        patch.object(published, "opener", lambda socket: lambda raw: Sealed(tmp_path.stat().st_uid, raw)),
    ):
        yield


def untagged(key: str = "7") -> Job:
    """What is left in Slurm of a job that opted out, once the helper has taken the tag off."""
    return job(key, per_node="", per_job="gres/gpu:1")


@pytest.mark.parametrize(
    "before",
    [job("7", tag=TAG, per_node="", per_job="gres/gpu:1"), job("7", tag=f"GS1:probe;t={TOKEN_A}")],
    ids=["known", "first run"],
)
def test_the_owner_is_told_when_the_helper_has_followed_and_ever_after(
    config: Config, unsealed: None, before: Job
) -> None:
    with Store.create(config.store_url) as store:
        site = OwnersView(config, store, [before, job("9", uid=OWNER + 1, tag=f"GS1:probe;t={TOKEN_A}")])
        site.tick()
        site.slurm.now_has([untagged()])
        assert "opted out: its owner took the token off" in site.told(untagged())
        assert "opted out" not in site.told(untagged("8")), "one that never took part"
        site.slurm.now_has([job("11", tag=TAG)])  # the first has ended, and the owner's file is written anew
        site.tick()
        site.restart()
        site.tick(2 * STAYS_S)
        assert "opted out" in site.told(untagged())
        assert "opted out" not in site.told(untagged(), OWNER + 1), "details are for the owner"


def test_what_was_long_ago_is_forgotten_and_what_another_release_wrote_left_out(config: Config, unsealed: None) -> None:
    with Store.create(config.store_url) as store:
        old = Decision(5, int(NOW - KEPT_S - 10), OPTED_OUT, reasons={"key": "5", "uid": OWNER})
        store.decisions.add([old, Decision(6, NOW - 100, OPTED_OUT, reasons={"key": "6"})])
        site = OwnersView(config, store, [job("11", tag=TAG)])
        site.tick()
        assert all("opted out" not in site.told(untagged(key)) for key in ("5", "6"))


def test_who_takes_thousands_of_jobs_out_costs_the_helper_no_more_memory(config: Config, unsealed: None) -> None:
    with Store.create(config.store_url) as store:
        many = range(100, 100 + 2 * MOST_JOBS)
        store.decisions.add([Decision(number, NOW, OPTED_OUT, reasons={"uid": OWNER}) for number in many])
        site = OwnersView(config, store, [])
        site.tick()
        assert list(site._publisher._left[OWNER]) == list(many)[-MOST_JOBS:]
        assert "opted out" in site.told(untagged(str(many[-1])))


def test_a_first_run_whose_comment_is_empty_has_opted_out_before_the_helper_follows() -> None:
    """Under Policy=shadow and off the helper never does: it changes no job."""
    first = job("7", tag=f"GS1:probe;t={TOKEN_A}")
    (found,) = _find(FakeSlurm([first], comment=""), ["7"], NOW)
    assert (found.opted_out, found.tag) == (True, None)
    (found,) = _find(FakeSlurm([first], []), ["7"], NOW)
    assert (found.opted_out, found.tag) == (False, first.tag)


def test_decisions_of_a_kind_are_read_on_from_where_one_was(tmp_path: Path) -> None:
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        made = [Decision(number, NOW + number, kind) for number, kind in enumerate(("waits", OPTED_OUT, "waits"))]
        store.decisions.add(made)
        found, last = store.decisions.of_kind(OPTED_OUT, NOW)
        assert [decision.job_id for decision in found] == [1]
        assert store.decisions.of_kind(OPTED_OUT, NOW, last) == ([], last)
        store.decisions.add([Decision(9, NOW, OPTED_OUT)])
        assert [decision.job_id for decision in store.decisions.of_kind(OPTED_OUT, NOW, last)[0]] == [9]
        assert [decision.job_id for decision in store.decisions.of_kind(OPTED_OUT, NOW, most=1)[0]] == [9], "the last"
        assert [decision.job_id for decision in store.decisions.of_kind(OPTED_OUT, NOW)[0]] == [1, 9], "oldest first"
