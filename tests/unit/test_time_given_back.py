"""Time that neighbours cost a job is given back to its limit, also when they have left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from world import NOW, TOKEN_A, TOKEN_B, FakeSlurm, Flat, node, running

from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store

LIMIT_S = 600


def sharer(key: str, token: str, start_s: float, limit_s: int) -> Job:
    tag = f"GS1:c=1;t={token};o=gpu:1"
    return running(
        key, "n0", "gres/shard:v100_0:1", tag=tag, start_s=int(start_s), limit_s=limit_s, end_s=start_s + limit_s
    )


class Scene:
    """A resident with a limit of ten minutes, and a helper that never measures how fast it is."""

    def __init__(self, directory: Path, store: Store, url: str) -> None:
        settings = f"Partitions=gpu\nGpusPerNode=2\nStoreUrl={url}\nSpoolDir={directory}\nStateDir={directory}\n"
        self.now_s = float(NOW)
        self.resident = sharer("1", TOKEN_A, NOW, LIMIT_S)
        self.slurm = FakeSlurm([self.resident], [node()])
        self.helper = Helper(parse_config(settings), self.slurm, store, Flat(0.7), clock=lambda: self.now_s)

    def guest_for(self, seconds: int) -> None:
        """Somebody comes, stays and leaves, looked at every five seconds."""
        guest = sharer(str(10 + int(self.now_s - NOW)), TOKEN_B, self.now_s, seconds)
        self.slurm.now_has([self.resident, guest])
        self.go_on(seconds)
        self.slurm.now_has([self.resident])

    def go_on(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            self.helper.tick()
            self.now_s += 5.0
        self.helper.tick()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with Store.create(url) as store:
        yield Scene(tmp_path, store, url)


def test_what_many_short_guests_cost_is_given_back_when_the_job_is_alone_again(scene: Scene) -> None:
    for _ in range(7):
        scene.guest_for(45)
    scene.go_on(60)
    assert "1" not in scene.slurm.limits, "nothing was measured, and its end is far away"
    scene.go_on(120)
    assert scene.slurm.limits["1"] == 12, "95 s at a rate of 0.7, in whole minutes"


def test_a_job_that_nobody_slowed_gets_nothing(scene: Scene) -> None:
    scene.go_on(LIMIT_S - 60)
    assert scene.slurm.limits == {}
