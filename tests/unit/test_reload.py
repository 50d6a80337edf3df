"""A reload changes the settings and nothing that is remembered: not in a placement, a pause or a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from world import NOW, TOKEN_A, TOKEN_B, FakeSlurm, Flat, job, node, record, running

from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.record import Period, Record, RecordKind, Stat
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store

SHARD = "gres/shard:v100_0:1"
PLACED = job("7", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1;g=n0:0", per_node=SHARD, wanted_nodes="n0")
RESIDENT = running("1", "n0", SHARD, tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1;m=0", start_s=NOW - 900)
GUEST = running("2", "n0", SHARD, tag=f"GS1:c=1;t={TOKEN_B};o=gpu:1", start_s=NOW - 800)


def interim(of: Job, samples: int) -> Record:
    """What a node has reported of a job that runs at half of its speed beside another."""

    def period(n: int, mean: float) -> Period:
        return Period(n / 2, n / 2, {"proc_sm_pct": Stat(n, mean, mean, mean, mean, 0.0)})

    numbers = {"kind": RecordKind.INTERIM, "seq": samples, "alone": period(100, 80.0), "shared": period(samples, 40.0)}
    return replace(record(of.raw_id, shared=True), **numbers)


class Scene:
    def __init__(self, directory: Path, store: Store, url: str) -> None:
        settings = f"Partitions=gpu\nGpusPerNode=2\nStoreUrl={url}\nSpoolDir={directory}\nStateDir={directory}\n"
        self.config, self.now_s = parse_config(settings), float(NOW)
        self.slurm = FakeSlurm([], [node()])
        self.helper = Helper(self.config, self.slurm, store, Flat(0.7), clock=lambda: self.now_s)

    def tick(self, *jobs: Job, after_s: float = 5.0) -> list[tuple[str, str]]:
        """What is changed in Slurm when these are its jobs."""
        self.slurm.now_has(jobs)
        self.slurm.written.clear()
        self.helper.tick()
        self.now_s += after_s
        return list(self.slurm.written)

    def reload(self) -> None:
        memory = dict(vars(self.helper.state))
        self.helper.configure(replace(self.config, tick_s=7.0))
        assert vars(self.helper.state) == memory


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with Store.create(url) as store:
        yield Scene(tmp_path, store, url)


def test_a_job_that_slurm_does_not_start_is_taken_back_in_time(scene: Scene) -> None:
    assert scene.tick(PLACED, after_s=31.0) == []
    scene.reload()
    assert scene.tick(PLACED) == [("update", "7")]
    scene.reload()
    assert scene.helper.state.placements.avoid(["n0", "n1"], scene.now_s) == {"7": frozenset({"n0"})}


def test_a_paused_guest_stands_still_until_its_neighbour_has_budget(scene: Scene) -> None:
    scene.tick(RESIDENT, GUEST)
    paused = f"{GUEST.admin_comment};p={int(scene.now_s)}s"
    stopped = replace(GUEST, state="STOPPED", admin_comment=paused, tag=parse_tag(paused))
    for _ in range(4):
        assert ("signal", "2") not in scene.tick(RESIDENT, stopped), "it would go on"
        scene.reload()


def test_what_was_measured_of_a_pair_is_known_afterwards(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    records = {1: interim(RESIDENT, 10)}
    monkeypatch.setattr(scene.helper._store.live, "of_jobs", lambda jobs: records)
    scene.tick(RESIDENT, GUEST)
    records[1] = interim(RESIDENT, 60)
    scene.tick(RESIDENT, GUEST)
    assert scene.helper.state.watch.measured(1)
    scene.reload()
    scene.tick(RESIDENT, GUEST)
    assert scene.helper.state.watch.measured(1), "half of the trial would be measured anew"
