"""Pairs while they last: what is measured, what is done about a broken promise, what is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpushare_lab.emulator.card import Demand
from gpushare_lab.job.contention import rate
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from world import NOW, TOKEN_A, TOKEN_B, running

from slurm_gpushare.helper.learner import elapsed_observations
from slurm_gpushare.helper.loop import at_once
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.pair_speeds import Beside, MeasuredRate, Tally, is_believed, lessons, seen_rate
from slurm_gpushare.helper.pairs import Ledger, Pair, PairChanges
from slurm_gpushare.helper.snapshot import Snapshot
from slurm_gpushare.helper.watch import ToDo, Watch
from slurm_gpushare.protocol.record import Closed, Features, Neighbour, Period, Record, RecordKind, Scope, Stat, new_id
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store
from slurm_gpushare.store.workloads import Profile


def stat(n: int, mean: float) -> Stat:
    return Stat(n, mean, mean, mean, mean, 0.0)


def record(
    job_id: int,
    alone_pct: float | None,
    shared_pct: float,
    n: int = 100,
    mem_mib: float = 4000.0,
    card_pct: float | None = None,
) -> Record:
    alone = Period(60.0, 0.0, {"proc_sm_pct": stat(100, alone_pct)}) if alone_pct is not None else Period()
    card = {} if card_pct is None else {"card_util_pct": stat(n, card_pct)}
    shared = Period(0.0, 60.0, {"proc_sm_pct": stat(n, shared_pct), **card})
    return Record(
        new_id(), new_id(), 1, RecordKind.INTERIM, Scope.JOB, job_id, "n0", 0, "V100", NOW - 100.0, float(NOW),
        Closed.OPEN,
        Features(mem_used_mib=mem_mib, mem_total_mib=16384.0), Period(), alone, shared,
    )  # fmt: skip


def rate_of(seen: MeasuredRate | None) -> float:
    assert seen is not None
    return seen.rate


def test_the_rate_is_the_share_of_the_gpu_over_the_share_alone() -> None:
    assert rate_of(seen_rate(record(1, 80.0, 40.0), Tally(), None)) == pytest.approx(0.5)
    assert rate_of(seen_rate(record(1, 80.0, 90.0), Tally(), None)) == 1.0


def test_the_first_seconds_of_a_run_alone_say_less_than_its_profile() -> None:
    """It still loads its data; its neighbour came at once."""
    begun = record(1, 33.0, 48.0)
    begun = replace(begun, alone=Period(1.0, 0.0, {"proc_sm_pct": stat(5, 33.0)}))
    known = {"proc_sm_pct_mean": 96.0}
    profile = Profile(TOKEN_A, "V100", 1000, 1, 1, 4000, 16384, 72.0, known, {}, None, NOW)
    assert rate_of(seen_rate(begun, Tally(), profile)) == pytest.approx(0.5, abs=0.02)


def test_an_earlier_neighbour_does_not_count_for_the_present_one() -> None:
    # 60 s at 60 %, of which the first 30 beside somebody else were at 80 %.
    assert rate_of(seen_rate(record(1, 80.0, 60.0), Tally(50, 30.0, 30.0 * 80.0), None)) == pytest.approx(0.5)


def test_too_little_says_nothing() -> None:
    assert seen_rate(record(1, 80.0, 40.0, n=5), Tally(), None) is None
    assert seen_rate(record(1, 1.0, 0.5), Tally(), None) is None
    assert seen_rate(record(1, None, 40.0), Tally(), None) is None


class Scene:
    """A resident (job 1) and a guest (job 2) on one card for 1000 s, with the telemetry that a test gives them."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        settings: str = "",
        guest_tag: str = "",
        since_s: int = 1000,
        rates_of: str = "V100",
    ) -> None:
        self.commands: list[list[str]] = []
        self.store = Store.create(f"sqlite:///{tmp_path}/store.sqlite")
        enter_profiles(
            self.store,
            [KnownProfile(token, 1000, "V100", 4000, 16384, 1, 2000.0) for token in (TOKEN_A, TOKEN_B)],
        )
        self.records: dict[int, Record] = {}
        monkeypatch.setattr(self.store.live, "of_jobs", lambda jobs: self.records)
        self.ledger = Ledger()
        self.config = parse_config(f"Partitions=gpu\n{settings}")
        self.watch = Watch(self.store, Slurm(self._run), self.ledger)
        tags = f"GS1:c=1;t={TOKEN_A};o=gpu:1", f"GS1:c=0;t={TOKEN_B};o=gpu:1{guest_tag}"
        began = NOW - since_s
        resident = running("1", "n0", "gres/shard:v100_0:1", tag=tags[0], start_s=began - 10, limit_s=6000)
        guest = running("2", "n0", "gres/shard:v100_0:1", tag=tags[1], start_s=began, limit_s=6000)
        self.pair = Pair(GpuAddress("n0", 0), resident, guest, began, 0.9, 0.8, gpu_model=rates_of)
        self.store.sharing.begin([self.pair.span()])
        self.ledger.follow({self.pair.key: self.pair}, [resident, guest], NOW)

    def _run(self, argv: Any) -> str:
        self.commands.append(list(argv))
        return ""

    def view(self, now_s: float = NOW) -> View:
        jobs = {job.key: job for job in (self.pair.resident, self.pair.guest)}
        return View(now_s, jobs, {}, {}, Snapshot(now_s, (), {}, ()))

    def look(self, resident: Record, guest: Record) -> list[str]:
        at_once(
            self.watch.look(PairChanges((self.pair,), (), {self.pair.key: self.pair}), self.view(), self.config)
        )  # nothing to compare yet
        self.records = {1: resident, 2: guest}
        return self.again()

    def again(self) -> list[str]:
        look = self.watch.look(PairChanges((), (), {self.pair.key: self.pair}), self.view(), self.config)
        return self.told(at_once(look))

    def end(self) -> list[str]:
        look = self.watch.look(PairChanges((), (self.pair,), {}), self.view(NOW + 60), self.config)
        return self.told(at_once(look))

    def told(self, todo: ToDo) -> list[str]:
        """What was decided, and what is to be done about jobs."""
        self.todo = todo
        marks, requeues = [mark.decision.kind for mark in todo.marks], ["requeued" for _ in todo.requeues]
        return [item.kind for item in todo.decisions] + marks + requeues


def test_a_pair_as_promised_is_left_alone_and_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert scene.look(record(1, 80.0, 72.0), record(2, 50.0, 40.0)) == []
    (span,) = scene.store.sharing.open()
    assert (span.resident_rate_seen, span.guest_rate_seen) == (pytest.approx(0.9), pytest.approx(0.8))
    scene.end()
    seen = {(item.victim, item.neighbour): item.rate for item in scene.store.observations.after(0)}
    assert seen == {(TOKEN_A, TOKEN_B): pytest.approx(0.9), (TOKEN_B, TOKEN_A): pytest.approx(0.8)}


@pytest.mark.parametrize(("earlier", "known"), [(2, True), (7, False)])
def test_a_helper_that_comes_later_counts_what_was_seen_beside_the_same_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int, known: bool
) -> None:
    """The next record may be minutes away."""
    scene = Scene(tmp_path, monkeypatch)
    resident = replace(record(1, 80.0, 40.0), neighbours=(Neighbour(earlier, 60.0),))
    scene.records = {1: resident, 2: replace(record(2, 80.0, 80.0), neighbours=(Neighbour(1, 60.0),))}
    assert ("paused" in scene.again()) is known


def test_what_is_measured_holds_for_all_of_the_time_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted were 10 % of 1000 s. Measured is a half, and nobody knows better for the time before."""
    scene = Scene(tmp_path, monkeypatch, "OnSlowdown=report")
    assert scene.ledger.sharing()[1].lost_s == pytest.approx(100.0)
    scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0))
    assert scene.ledger.sharing()[1].lost_s == pytest.approx(500.0)
    assert scene.watch.measured(1)
    assert not scene.watch.measured(3)


def test_a_pairing_is_learned_from_at_its_first_verdict_and_in_full_after_two_minutes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, since_s=20)
    scene.look(record(1, 80.0, 72.0), record(2, 50.0, 40.0))
    assert [seen.weight for seen in scene.store.observations.after(0)] == [0.5, 0.5]
    for _ in range(2):
        at_once(
            scene.watch.look(PairChanges((), (), {scene.pair.key: scene.pair}), scene.view(NOW + 100), scene.config)
        )
    scene.end()
    assert [seen.weight for seen in scene.store.observations.after(0)] == [0.5] * 4


def test_who_came_last_is_paused_when_the_resident_is_about_to_lose_more_than_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert "paused" in scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0))
    (mark,) = scene.todo.marks
    assert f";p={NOW}s" in mark.change.fields["AdminComment"], "the tag says that it is ours"
    scene.watch.pauses.begin(mark.job, NOW)
    (order,) = scene.watch.pauses.orders(NOW).values()
    assert order.jobs == {2}


@pytest.mark.parametrize("mps", ["off", "user"])
def test_a_client_of_mps_is_paused_only_where_the_site_manages_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mps: str
) -> None:
    """Whether it goes on unhurt is to be tried on the card first."""
    scene = Scene(tmp_path, monkeypatch, f"Mps={mps}", rates_of="V100MPS")
    assert ("paused" in scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0))) is (mps == "user")


def test_where_nobody_is_to_be_paused_promises_are_only_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, "OnSlowdown=report", since_s=4000)
    assert scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0)) == ["slowed", "slowed"]


@pytest.mark.parametrize(
    ("hidden", "guest_tag", "done"),
    [
        ((60.0, 0.0), "", ["slowed", "slowed", "paused"]),
        ((60.0, 0.0), ";r=1", ["slowed", "slowed", "requeued"]),
        ((0.0, 60.0), "", ["slowed", "slowed"]),  # the resident hides: its guest is not paused for that
    ],
)
def test_a_pair_of_which_one_is_not_seen_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: tuple[float, float], guest_tag: str, done: list[str]
) -> None:
    scene = Scene(tmp_path, monkeypatch, guest_tag=guest_tag)
    records = (replace(record(job, 80.0, 79.0), untold_s=hidden[job - 1]) for job in (1, 2))
    assert scene.look(*records) == done
    assert not scene.store.sharing.banned(0.0), "nobody knows whose fault it is"
    assert list(scene.store.observations.after(0)) == []
    if "paused" in done:
        scene.watch.pauses.begin(scene.todo.marks[0].job, NOW)
        assert scene.again() == []
        assert scene.watch.pauses.jobs == {2}, "it stands still for as long as a pause may last"


@pytest.mark.parametrize(("limit_s", "paused"), [(40_000, True), (1_080, False)])
def test_a_clock_that_cannot_be_given_back_bounds_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: int, paused: bool
) -> None:
    """Its pessimistic end must fit its limit less 5 %."""
    scene = Scene(tmp_path, monkeypatch, "ExtendTimeLimit=no")
    guest = replace(scene.pair.guest, limit_s=limit_s, end_s=scene.pair.since_s + limit_s)
    scene.pair = replace(scene.pair, guest=guest)
    scene.ledger.follow({scene.pair.key: scene.pair}, [scene.pair.resident, guest], NOW)
    assert ("paused" in scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0))) is paused


@pytest.mark.parametrize("since_s", [1000, 4000])
def test_a_resident_that_idles_on_purpose_gets_nobody_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since_s: int
) -> None:
    """It does a twentieth of what it did alone on a card that has two thirds of its time to spare."""
    scene = Scene(tmp_path, monkeypatch, since_s=since_s, guest_tag=";r=1")
    assert scene.look(record(1, 80.0, 4.0, card_pct=34.0), record(2, 30.0, 30.0, card_pct=34.0)) == []
    assert scene.store.sharing.banned(NOW) == set()
    assert scene.store.violations.broken_promises() == []
    assert scene.ledger.sharing()[1].lost_s == 0.0, "no time is given back for it"
    assert not scene.watch.measured(1)
    (span,) = scene.store.sharing.open()
    assert (span.resident_rate_seen, span.guest_rate_seen) == (1.0, 1.0)
    scene.end()
    assert [item.victim for item in scene.store.observations.after(0)] == [TOKEN_B], "its own rate is not learned"


def test_the_same_loss_on_a_busy_card_is_the_neighbours_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    assert "paused" in scene.look(record(1, 80.0, 4.0, card_pct=88.0), record(2, 84.0, 84.0, card_pct=88.0))


def test_every_loss_of_the_contention_model_is_believed() -> None:
    """Honest jobs that are slowed by memory bandwidth leave the card less busy than their losses suggest."""
    shares = [Demand(gpu, access * gpu, 1000) for gpu in range(5, 101, 5) for access in (0.0, 0.3, 0.6, 0.9)]
    for one in shares:
        for other in shares:
            own, others = rate(one, [other]), rate(other, [one])
            card_pct = min(100.0, own * one.gpu_util_pct + others * other.gpu_util_pct)
            assert is_believed(own, 1.0, card_pct), (one, other, own, card_pct)


def test_reporting_changes_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, "OnSlowdown=report")
    assert scene.look(record(1, 80.0, 40.0), record(2, 80.0, 80.0)) == ["slowed", "slowed"]
    assert scene.again() == [], "told once"
    assert scene.store.sharing.banned(NOW) == {(TOKEN_A, TOKEN_B)}


def test_no_alarm_from_what_could_be_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest slowed by 55 % with 50 promised, measured with an error of 5 %: that is not sure."""
    scene = Scene(tmp_path, monkeypatch, "OnSlowdown=report")
    assert scene.look(record(1, 80.0, 80.0), record(2, 80.0, 80.0 / 1.55)) == []
    assert scene.store.sharing.banned(NOW) == set()


def test_pausing_cannot_help_a_guest_that_is_slowed_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch, since_s=4000)
    assert scene.look(record(1, 80.0, 80.0), record(2, 80.0, 20.0)) == ["slowed", "slowed"], "no requeue unasked"
    (broken,) = scene.store.violations.broken_promises()
    assert (broken.job_id, broken.by_job, broken.node, broken.gpu_index) == (2, 1, "n0", 0)
    assert broken.promised_pct == 50.0 < broken.slowed_pct


def test_a_guest_that_is_slowed_is_requeued_with_its_owners_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, guest_tag=";r=1", since_s=4000)
    assert "requeued" in scene.look(record(1, 80.0, 80.0), record(2, 80.0, 20.0))
    assert [job.key for job, *_ in scene.todo.requeues] == ["2"]


def test_a_successor_has_a_residents_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = record(1, 80.0, 80.0), record(2, 80.0, 55.0)  # slowed by 45 %
    assert Scene(_made(tmp_path / "a"), monkeypatch, "OnSlowdown=report", since_s=4000).look(*rates) == []
    scene = Scene(_made(tmp_path / "b"), monkeypatch, "OnSlowdown=report", guest_tag=";h=1", since_s=4000)
    assert scene.look(*rates) == ["slowed", "slowed"]


def test_a_job_that_outgrew_its_profile_is_named_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, guest_tag=";r=1")
    kinds = scene.look(record(1, 80.0, 76.0, mem_mib=4000), record(2, 50.0, 45.0, mem_mib=12_288))
    assert kinds == ["outgrown", "outgrown", "requeued"]
    profile = scene.store.profiles.get(TOKEN_B)
    assert profile is not None
    assert profile.mem_used_mib == 12_288, "so that nobody joins it who would not fit"


def test_running_out_of_memory_together_raises_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.look(record(1, 80.0, 72.0, mem_mib=10_000), record(2, 50.0, 40.0, mem_mib=6_000))
    failed = running("2", "n0", "gres/shard:v100_0:1", state="FAILED")
    monkeypatch.setattr(scene.watch._memory._slurm, "jobs", lambda keys: [failed])
    assert scene.end() == ["out-of-memory"]
    profile = scene.store.profiles.get(TOKEN_B)
    assert profile is not None
    assert profile.mem_used_mib > 6_000, "more than what its neighbour left of the card"


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(("card_pct", "learned"), [(34.0, False), (88.0, True), (None, True)])
def test_a_final_record_teaches_no_loss_that_the_card_had_time_for(card_pct: float | None, learned: bool) -> None:
    """Neither its activity nor how long it took: both are the job's own doing where the card was not busy."""
    beside = {2: Beside(TOKEN_B, 60.0, expected=0.9)}
    ended = replace(record(1, 80.0, 16.0, card_pct=card_pct), neighbours=(Neighbour(2, 60.0),))
    assert bool(lessons(ended, None, beside)) == learned
    profile = Profile(TOKEN_A, "V100", 1000, 1, 1, 4000, 16384, 72.0, {}, {}, None, NOW)
    assert bool(elapsed_observations(ended, profile, beside)) == learned
