"""Pairs while they last: what is measured, what is done about a broken promise, what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slurm_things import NOW, TOKEN_A, TOKEN_B, running

from slurm_gpushare.config import parse_config
from slurm_gpushare.coschedule.ledger import Ledger, Pair, Turn
from slurm_gpushare.coschedule.occupancy import Card
from slurm_gpushare.coschedule.watch import Tally, Watch, seen_rate
from slurm_gpushare.slurm.commands import CommandSlurm
from slurm_gpushare.store import Store
from slurm_gpushare.store.known import KnownProfile, enter_profiles
from slurm_gpushare.telemetry.record import Closed, Features, Kind, Period, Record, Scope, Stat, new_id


def stat(n: int, mean: float) -> Stat:
    return Stat(n, mean, mean, mean, mean, 0.0)


def record(job_id: int, alone_pct: float | None, shared_pct: float, n: int = 100, mem_mib: float = 4000.0) -> Record:
    alone = Period(60.0, 0.0, {"proc_sm_pct": stat(100, alone_pct)}) if alone_pct is not None else Period()
    shared = Period(0.0, 60.0, {"proc_sm_pct": stat(n, shared_pct)})
    return Record(
        new_id(), new_id(), 1, Kind.INTERIM, Scope.JOB, job_id, "n0", 0, "V100", NOW - 100.0, float(NOW), Closed.OPEN,
        Features(mem_used_mib=mem_mib, mem_total_mib=16384.0), Period(), alone, shared,
    )  # fmt: skip


def test_the_rate_is_the_share_of_the_gpu_over_the_share_alone() -> None:
    assert seen_rate(record(1, 80.0, 40.0), Tally(), None) == pytest.approx(0.5)
    assert seen_rate(record(1, 80.0, 90.0), Tally(), None) == 1.0


def test_an_earlier_neighbour_does_not_count_for_the_present_one() -> None:
    # 100 samples at 60 %, of which the first 50 beside somebody else were at 80 %.
    assert seen_rate(record(1, 80.0, 60.0), Tally(50, 50 * 80.0), None) == pytest.approx(0.5)


def test_too_little_says_nothing() -> None:
    assert seen_rate(record(1, 80.0, 40.0, n=5), Tally(), None) is None
    assert seen_rate(record(1, 1.0, 0.5), Tally(), None) is None
    assert seen_rate(record(1, None, 40.0), Tally(), None) is None


class Scene:
    """A resident (job 1) and a guest (job 2) on one card, with the telemetry that a test gives them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str = "", heir: bool = False) -> None:
        self.commands: list[list[str]] = []
        self.store = Store.create(f"sqlite:///{tmp_path}/store.sqlite")
        enter_profiles(
            self.store,
            [KnownProfile(token, 1000, "V100", 4000, 16384, 1, 1000.0) for token in (TOKEN_A, TOKEN_B)],
        )
        self.records: dict[int, Record] = {}
        monkeypatch.setattr(self.store.live, "of_jobs", lambda jobs: self.records)
        self.ledger = Ledger()
        config = parse_config(f"Partitions=gpu\n{settings}")
        self.watch = Watch(config, self.store, CommandSlurm(self._run), self.ledger)
        resident = running("1", "n0", "gres/shard:v100_0:1", tag=f"GS1:c=1;t={TOKEN_A};o=gpu:1", start_s=NOW - 100)
        guest = running(
            "2",
            "n0",
            "gres/shard:v100_0:1",
            tag=f"GS1:c=0;t={TOKEN_B};o=gpu:1{';h=1' if heir else ''}",
            start_s=NOW - 90,
        )
        self.pair = Pair(Card("n0", 0), resident, guest, NOW - 90, 0.9, 0.8)
        self.store.sharing.begin([self.pair.span("V100")])
        self.ledger.turn({self.pair.key: self.pair}, [resident, guest], NOW)

    def _run(self, argv: Any) -> str:
        self.commands.append(list(argv))
        return ""

    def look(self, resident: Record, guest: Record) -> list[str]:
        self.watch.look(Turn((self.pair,), (), {self.pair.key: self.pair}), NOW)  # first sight: nothing to compare yet
        self.records = {1: resident, 2: guest}
        return [item.kind for item in self.watch.look(Turn((), (), {self.pair.key: self.pair}), NOW)]

    def end(self) -> list[str]:
        return [item.kind for item in self.watch.look(Turn((), (self.pair,), {}), NOW + 60)]


def test_a_pair_as_promised_is_left_alone_and_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert scene.look(record(1, 80.0, 72.0), record(2, 50.0, 40.0)) == []
    (span,) = scene.store.sharing.open()
    assert (span.resident_rate_seen, span.guest_rate_seen) == (pytest.approx(0.9), pytest.approx(0.8))
    scene.end()
    seen = {(item.victim, item.neighbour): item.rate for item in scene.store.observations.after(0)}
    assert seen == {(TOKEN_A, TOKEN_B): pytest.approx(0.9), (TOKEN_B, TOKEN_A): pytest.approx(0.8)}


def test_a_long_pairing_is_learned_from_while_it_lasts_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.look(record(1, 80.0, 72.0), record(2, 50.0, 40.0))
    assert scene.store.observations.after(0) == []  # 90 s are too short
    for _ in range(2):
        scene.watch.look(Turn((), (), {scene.pair.key: scene.pair}), NOW + 30)
    scene.end()
    assert len(scene.store.observations.after(0)) == 2


def test_a_guest_slowed_past_its_promise_is_reported_and_never_paired_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert scene.look(record(1, 80.0, 80.0), record(2, 80.0, 20.0)) == ["slowed", "slowed"]
    assert scene.store.sharing.forbidden() == {(TOKEN_A, TOKEN_B)}
    assert scene.commands == [], "OnSlowdown=report changes nothing"


def test_a_successor_is_judged_by_its_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a quarter of its speed for 90 s it has lost 18 s as predicted, of 1000: no guest would be left so."""
    scene = Scene(tmp_path, monkeypatch, heir=True)
    assert scene.look(record(1, 80.0, 80.0), record(2, 80.0, 20.0)) == []
    assert scene.store.sharing.forbidden() == set()
    scene.ledger.turn({scene.pair.key: scene.pair}, [scene.pair.resident, scene.pair.guest], NOW + 600)
    kinds = [item.kind for item in scene.watch.look(Turn((), (), {scene.pair.key: scene.pair}), NOW + 600)]
    assert kinds == ["slowed", "slowed"]  # by then it has lost more than 450 s


def test_requeue_takes_the_one_that_joined_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, "OnSlowdown=requeue")
    assert "requeued" in scene.look(record(1, 80.0, 80.0), record(2, 80.0, 20.0))
    assert scene.commands == [["scontrol", "requeue", "2"]]


def test_running_out_of_memory_together_raises_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.look(record(1, 80.0, 72.0, mem_mib=10_000), record(2, 50.0, 40.0, mem_mib=6_000))
    failed = running("2", "n0", "gres/shard:v100_0:1", state="FAILED")
    monkeypatch.setattr(scene.watch._slurm, "jobs", lambda keys: [failed])
    assert scene.end() == ["out-of-memory"]
    profile = scene.store.profiles.get(TOKEN_B)
    assert profile is not None
    assert profile.mem_used_mib > 6_000, "more than what its neighbour left of the card"
