"""Owners who take the token off: the helper follows, and a tick stays short however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from plan_scenes import Flat
from slurm_things import NOW, TOKEN_A, WatchedSlurm, job, node

from slurm_gpushare.config import parse_config
from slurm_gpushare.coschedule.changer import MANY
from slurm_gpushare.coschedule.tick import Helper
from slurm_gpushare.store import Store


class Withdrawn(WatchedSlurm):
    """All comments are empty now."""

    def comments(self, only: Iterable[str] = ()) -> dict[str, str]:
        return dict.fromkeys((item.key for item in self.queue), "")


def test_an_array_that_opts_out_at_once_is_followed_in_parts(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    settings = f"Partitions=gpu\nGpusPerNode=2\nStoreUrl={url}\nSpoolDir={tmp_path}\nStateDir={tmp_path}\n"
    tasks = [job(f"7_{task}", tag=f"GS1:probe;t={TOKEN_A}") for task in range(MANY + 50)]
    slurm, now_s = Withdrawn(tasks, [node()]), [float(NOW)]
    with Store.create(url) as store:
        helper = Helper(parse_config(settings), slurm, store, Flat(0.9), clock=lambda: now_s[0])
        helper.tick()
        first = {key for _, key in slurm.written}
        assert 0 < len(first) <= MANY
        slurm.queue = [item for item in slurm.queue if item.key not in first]
        now_s[0] += 5.0
        helper.tick()
    assert len({key for _, key in slurm.written}) > len(first), "the rest at the next look, not half a minute later"
