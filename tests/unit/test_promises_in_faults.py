"""Whatever fails beside them, promises are kept; and what Slurm refuses once is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_reload import GUEST, RESIDENT, Scene, interim
from world import NOW

from slurm_gpushare.helper import tick as tick_module
from slurm_gpushare.helper.loop import LONGEST_RETRY_S
from slurm_gpushare.helper.state import Requeue
from slurm_gpushare.helper.tick import REQUEUE_TRIES
from slurm_gpushare.helper.watch import Watch
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import UpdateRefused
from slurm_gpushare.store import Store, StoreError


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    url = f"sqlite:///{tmp_path}/store.sqlite"
    with Store.create(url) as store:
        yield Scene(tmp_path, store, url)


def is_paused(scene: Scene, monkeypatch: pytest.MonkeyPatch, ticks: int = 4) -> bool:
    """Whether the guest, beside whom the resident runs at half of its speed, is stopped within some looks."""
    records = {1: interim(RESIDENT, 10)}
    monkeypatch.setattr(scene.helper._store.live, "of_jobs", lambda jobs: records)
    for number in range(ticks):
        try:
            scene.tick(RESIDENT, GUEST)
        except (GpushareError, OSError):
            scene.now_s += 5.0  # the loop tries it again
        records[1] = interim(RESIDENT, 60 + 50 * number)
        if scene.helper.state.watch.pauses.jobs:
            return True
    return False


def test_the_guest_is_paused_where_nothing_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_paused(scene, monkeypatch)
    assert ("update", "2") in scene.slurm.written


def fail(*values: Any, **named: Any) -> Any:
    raise OSError(24, "too many open files")


BOUNDARY: dict[str, Callable[[Scene], tuple[Any, str]]] = {
    "comments": lambda scene: (scene.slurm, "comments"),
    "spans begin": lambda scene: (scene.helper._store.sharing, "begin"),
    "spans are read": lambda scene: (scene.helper.state.spans, "keep"),
    "profiles are checked": lambda scene: (scene.helper.state.profile_watch, "look"),
    "placements are taken back": lambda scene: (scene.helper.state.placements, "overdue"),
    "plan": lambda scene: (tick_module, "plan"),
    "reasons": lambda scene: (scene.helper.state.reasons, "update"),
    "leases": lambda scene: (tick_module, "restore"),
    "decisions are kept": lambda scene: (scene.helper._store.decisions, "add"),
    "time is given back": lambda scene: (tick_module, "extension"),
}


@pytest.mark.parametrize("what", BOUNDARY)
def test_a_fault_beside_promises_keeps_none_from_being_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(*BOUNDARY[what](scene), fail)
    assert is_paused(scene, monkeypatch)


def test_a_store_that_is_away_for_a_moment_loses_no_promise(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = scene.helper._store.sharing.begin, iter([StoreError("locked")])

    def begin(spans: Any) -> None:
        if (error := next(calls, None)) is not None:
            raise error
        add(spans)

    monkeypatch.setattr(scene.helper._store.sharing, "begin", begin)
    assert is_paused(scene, monkeypatch)


def test_a_requeue_that_slurm_refuses_once_is_tried_again(scene: Scene) -> None:
    tried: list[str] = []

    def refuse(what: str, key: str) -> None:
        if what == "requeue":
            tried.append(key)
            if len(tried) == 1:
                raise UpdateRefused("scontrol: busy")

    scene.slurm.on_change = refuse
    scene.helper.state.requeues[2] = Requeue(GUEST, RESIDENT, "memory")
    assert ("requeue", "2") not in scene.tick(RESIDENT, GUEST)
    assert ("requeue", "2") in scene.tick(RESIDENT, GUEST)
    assert ("requeue", "2") not in scene.tick(RESIDENT, GUEST)
    assert tried == ["2", "2"]


def test_a_requeue_that_slurm_always_refuses_is_tried_ever_later_and_given_up(scene: Scene) -> None:
    tried_s: list[float] = []

    def refuse(what: str, key: str) -> None:
        if what == "requeue":
            tried_s.append(scene.now_s)
            raise UpdateRefused("scontrol: no")

    scene.slurm.on_change = refuse
    scene.helper.state.requeues[2] = Requeue(GUEST, RESIDENT, "memory")
    for _ in range(240):
        scene.tick(RESIDENT, GUEST)
    gaps_s = [after - before for before, after in pairwise(tried_s)]
    assert gaps_s == sorted(gaps_s)
    assert gaps_s[-1] >= LONGEST_RETRY_S
    assert len(tried_s) == REQUEUE_TRIES
    assert not scene.helper.state.requeues


def test_a_requeue_is_forgotten_with_its_job(scene: Scene) -> None:
    scene.helper.state.requeues[7] = Requeue(GUEST, RESIDENT, "memory")
    scene.tick(RESIDENT, GUEST)
    assert not scene.helper.state.requeues


def with_id(of: Job, raw_id: int) -> Job:
    return replace(of, key=str(raw_id), raw_id=raw_id)


def test_what_is_remembered_of_pairs_goes_with_them(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_paused(scene, monkeypatch)
    watch: Watch = scene.helper.state.watch
    watch._entered |= {(raw_id, raw_id + 1) for raw_id in range(100, 5000)}
    watch._told |= {(raw_id, raw_id + 1, raw_id) for raw_id in range(100, 5000)}
    watch.pauses._why_ended |= dict.fromkeys(range(100, 5000), "it went on")
    scene.tick(RESIDENT, GUEST)
    remembered = len(watch._entered) + len(watch._told) + len(watch.pauses._why_ended)
    assert remembered <= 4


def test_a_reload_in_a_pause_ends_it_no_sooner_and_counts_one_broken_promise(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_paused(scene, monkeypatch)
    since_s = scene.helper.state.watch.pauses.since_s(2)
    for _ in range(6):
        scene.reload()
        paused = f"{GUEST.admin_comment};p={int(since_s or NOW)}s"
        scene.tick(RESIDENT, replace(GUEST, admin_comment=paused, tag=parse_tag(paused)))
    assert scene.helper.state.watch.pauses.since_s(2) == since_s
    assert len(list(scene.helper._store.violations.broken_promises())) <= 1
