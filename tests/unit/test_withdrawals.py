"""Owners who take the token off: the helper follows, and a tick stays short however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from world import NOW, TOKEN_A, FakeSlurm, Flat, job, node

from slurm_gpushare.helper.act import MANY
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.history import OPTED_OUT
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.store import Store, StoreError
from slurm_gpushare.store.stored_jobs import Decisions


def withdrawn(jobs: Iterable[Job]) -> FakeSlurm:
    """All comments are empty now."""
    return FakeSlurm(jobs, [node()], comment="")


def settings(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    return f"Partitions=gpu\nGpusPerNode=2\nStoreUrl={url}\nSpoolDir={tmp_path}\nStateDir={tmp_path}\n"


def test_an_array_that_opts_out_at_once_is_followed_in_parts(tmp_path: Path) -> None:
    config = parse_config(settings(tmp_path))
    tasks = [job(f"7_{task}", tag=f"GS1:probe;t={TOKEN_A}") for task in range(MANY + 50)]
    slurm, now_s = withdrawn(tasks), [float(NOW)]
    with Store.create(config.store_url) as store:
        helper = Helper(config, slurm, store, Flat(0.9), clock=lambda: now_s[0])
        helper.tick()
        first = {key for _, key in slurm.written}
        assert 0 < len(first) <= MANY
        slurm.now_has(item for key, item in slurm.queue.items() if key not in first)
        now_s[0] += 5.0
        helper.tick()
    assert len({key for _, key in slurm.written}) > len(first), "the rest at the next look, not half a minute later"


OUT = pytest.mark.parametrize(
    "out",
    [
        {"tag": f"GS1:probe;t={TOKEN_A}"},
        {"tag": f"GS1:c=1;t={TOKEN_A};o=gpu:1", "per_node": "", "per_job": "gres/gpu:1"},
    ],
    ids=["by the comment", "by the request"],
)


@OUT
def test_jobs_that_slurm_refuses_to_change_do_not_keep_others_waiting(tmp_path: Path, out: dict[str, str]) -> None:
    config = parse_config(settings(tmp_path))
    slurm, now_s = withdrawn(job(str(number), **out) for number in range(1, MANY + 11)), [float(NOW)]

    def refuse(_what: str, key: str) -> None:
        if int(key) <= MANY:
            raise SlurmError("scontrol: Invalid node name specified")

    slurm.on_change = refuse
    with Store.create(config.store_url) as store:
        helper = Helper(config, slurm, store, Flat(0.9), clock=lambda: now_s[0])
        for _ in range(3):
            helper.tick()
            now_s[0] += 5.0
    assert {key for _, key in slurm.written} == {str(number) for number in range(MANY + 1, MANY + 11)}


@OUT
@pytest.mark.parametrize("fails", ["slurmctld", "store"])
def test_what_was_done_before_a_failure_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: dict[str, str], fails: str
) -> None:
    """The tag is off then, and nothing but the decision tells the owner why."""
    config = parse_config(settings(tmp_path))
    slurm, now_s = withdrawn([job("1", **out), job("2", **out)]), [float(NOW)]

    def go_away(_what: str, key: str) -> None:
        if key == "2":
            raise ControllerDown("scontrol: no answer")

    with Store.create(config.store_url) as store:
        helper = Helper(config, slurm, store, Flat(0.9), clock=lambda: now_s[0])
        with monkeypatch.context() as patched:
            if fails == "slurmctld":
                patched.setattr(slurm, "on_change", go_away)
            else:
                patched.setattr(Decisions, "add", _full)
            with pytest.raises(GpushareError):
                helper.tick()
        done = sorted({int(key) for _, key in slurm.written})
        assert done[0] == 1
        slurm.now_has([])
        for _ in range(2):
            now_s[0] += 60.0
            helper.tick()
            told = [decision.job_id for decision in store.decisions.of_kind(OPTED_OUT, 0.0)[0]]
            assert sorted(told) == done, "each once"


def _full(*_: object) -> None:
    raise StoreError("the disk is full")
