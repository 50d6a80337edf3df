"""Whose activity it is: the samples of a card, divided between the job and its neighbour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_gpushare.node.measure import Identity, RunSoFar
from slurm_gpushare.node.nvml import CardSample, ProcessLoad
from slurm_gpushare.protocol.record import ENOUGH, UNTOLD_MOST_S, Closed, RecordKind, encode_record, parse_record

OWN, OTHER, UNKNOWN, OUTSIDE = 100, 200, 300, 500
OWNS = {OWN: True, OTHER: False, UNKNOWN: None, OUTSIDE: False}.get


@pytest.fixture(autouse=True)
def outsiders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_gpushare.node.shares.is_outsider", lambda pid, neighbours: pid == OUTSIDE)


def card(util: float, access: float, **processes: tuple[float, float, float]) -> CardSample:
    by_pid = {
        {"own": OWN, "other": OTHER, "unknown": UNKNOWN, "outside": OUTSIDE}[name]: ProcessLoad(mem, sm, acc)
        for name, (mem, sm, acc) in processes.items()
    }
    return CardSample(util, access, 200 + sum(load.mem_mib or 0 for load in by_pid.values()), 16384.0, {}, by_pid)


ALONE = card(60, 30, own=(4096, 60, 30))
SHARED = card(95, 55, own=(4096, 45, 22), other=(8192, 50, 33))


def run_of(*samples: CardSample, neighbours: tuple[int, ...] = (), elapsed_s: float = 1.0) -> RunSoFar:
    run = RunSoFar(Identity(1, "gpu0", 0), start_s=1000.0)
    for sample in samples:
        run.add_cards([sample], OWNS, dict.fromkeys(neighbours), elapsed_s)
    return run


def test_alone_the_card_s_numbers_are_the_job_s() -> None:
    record = run_of(ALONE, ALONE).record(RecordKind.FINAL, 1010.0)
    features = record.features
    assert (features.mgup, features.mgmap, features.mgtsamp) == (60, 25, 30)
    assert (features.mem_used_mib, features.mem_total_mib) == (4096, 16384)
    assert (record.alone_s, record.shared_s, record.neighbours) == (2, 0, ())


def test_shared_only_the_job_s_own_processes_count() -> None:
    record = run_of(SHARED, SHARED, neighbours=(7,)).record(RecordKind.FINAL, 1010.0)
    features = record.features
    assert (features.mgup, features.mgmap, features.mgtsamp) == (45, 25, 22)
    assert (record.alone_s, record.shared_s) == (0, 2)
    assert [(neighbour.job_id, neighbour.seconds) for neighbour in record.neighbours] == [(7, 2)]
    assert record.profile.stats["card_util_pct"].max == 95


def still(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    monkeypatch.setattr("slurm_gpushare.node.shares.stands_still", lambda pid: pid in pids)


@pytest.mark.parametrize("at_rest", [OWN, OTHER])
def test_while_one_side_is_at_rest_only_the_memory_counts(monkeypatch: pytest.MonkeyPatch, at_rest: int) -> None:
    still(monkeypatch, at_rest)
    loads = SHARED.processes or {}
    sample = replace(SHARED, processes=loads | {at_rest: replace(loads[at_rest], sm_pct=0.0)})
    record = run_of(sample, sample, neighbours=(7,)).record(RecordKind.INTERIM, 1010.0)
    assert (record.alone_s, record.shared_s, record.profile.stats) == (0, 0, {})
    assert record.features.mem_used_mib == 4096


@pytest.mark.parametrize("at_look", [OWN, OTHER])
def test_who_stops_itself_for_a_look_counts_with_what_it_used(monkeypatch: pytest.MonkeyPatch, at_look: int) -> None:
    still(monkeypatch, at_look)
    record = run_of(SHARED, SHARED, neighbours=(7,)).record(RecordKind.INTERIM, 1010.0)
    assert record.shared_s == 2
    assert record.shared.stats["proc_sm_pct"].mean == 45


def test_what_the_helper_stopped_counts_nowhere() -> None:
    run = RunSoFar(Identity(1, "gpu0", 0), start_s=1000.0)
    run.add_cards([SHARED], OWNS, {7: None}, 1.0, stopped=True)
    record = run.record(RecordKind.INTERIM, 1010.0)
    assert (record.alone_s, record.shared_s, record.profile.stats) == (0, 0, {})


def test_a_new_neighbour_is_looked_at_often_until_there_is_enough_for_a_verdict() -> None:
    run = run_of(ALONE)
    assert not run.begins_to_share
    silent = replace(SHARED, processes={OWN: ProcessLoad(4096), OTHER: ProcessLoad(8192)})
    for number in range(ENOUGH):
        run.add_cards([SHARED], OWNS, {7: None}, 1.0)
        run.add_cards([silent], OWNS, {7: None}, 1.0)  # the driver has no new sample of a process yet
        assert (run.begins_to_share, run.has_news) == (True, False), number
    run.add_cards([SHARED], OWNS, {7: None}, 1.0)
    assert (run.begins_to_share, run.has_news) == (False, True), "a record is due"
    run.record(RecordKind.INTERIM, 1010.0)
    assert not run.has_news
    run.add_cards([SHARED], OWNS, {8: None}, 1.0)
    assert run.begins_to_share, "the next one is a pair of its own"


@pytest.mark.parametrize("ours", [True, False])
def test_one_stopped_process_among_others_hides_nothing(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """Anybody can have one: a job would measure as idle, or make its neighbour's loss unseen."""
    decoy = 400
    still(monkeypatch, decoy)
    processes = {**(SHARED.processes or {}), decoy: ProcessLoad(10.0, 0.0, 0.0)}
    run = RunSoFar(Identity(1, "gpu0", 0), start_s=1000.0)
    for _ in range(2):
        run.add_cards(
            [replace(SHARED, processes=processes)], {OWN: True, OTHER: False, decoy: ours}.get, {7: None}, 1.0
        )
    record = run.record(RecordKind.INTERIM, 1010.0)
    assert record.shared_s == 2
    assert record.shared.stats["proc_sm_pct"].mean == 45


def test_a_stopped_process_on_one_card_of_a_gang_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoy = 400
    still(monkeypatch, decoy)
    gang = RunSoFar(Identity(1, "gpu0", 0, others=(1,)), start_s=1000.0)
    second = CardSample(0, 0, 210, 16384.0, {}, {decoy: ProcessLoad(10.0, 0.0, 0.0)})
    gang.add_cards([ALONE, second], {OWN: True, decoy: True}.get, {}, 1.0)
    assert gang.record(RecordKind.INTERIM, 1010.0).alone_s == 1


def test_what_is_of_no_job_and_uses_next_to_nothing_changes_nothing() -> None:
    alone = card(61, 30, own=(4096, 60, 30), outside=(9, 1, 0))
    shared = card(96, 55, own=(4096, 45, 22), other=(8192, 50, 33), outside=(9, 1, 0))
    record = run_of(alone, alone).record(RecordKind.FINAL, 1010.0)
    assert (record.alone_s, record.alone.stats["proc_sm_pct"].mean) == (2, 60), "a new workload is measured"
    record = run_of(shared, shared, neighbours=(7,)).record(RecordKind.FINAL, 1010.0)
    assert (record.shared_s, record.shared.stats["proc_sm_pct"].mean) == (2, 45)
    assert "outside_pct" not in record.shared.stats


def test_what_a_job_loses_to_processes_of_no_job_is_nobodys_and_the_rest_is_judged() -> None:
    shared = card(95, 55, own=(4096, 25, 12), other=(8192, 50, 33), outside=(9, 20, 5))
    record = run_of(shared, shared, neighbours=(7,)).record(RecordKind.FINAL, 1010.0)
    assert (record.shared_s, record.shared.stats["proc_sm_pct"].mean) == (2, 45)
    assert record.shared.stats["outside_pct"].mean == 20
    assert parse_record(encode_record(record)) == record
    record = run_of(*[card(80, 30, own=(4096, 60, 30), outside=(9, 20, 5))] * 2).record(RecordKind.FINAL, 1010.0)
    assert (record.alone_s, record.shared_s) == (2, 0)


def test_how_long_nobody_could_say_who_uses_the_card_is_told() -> None:
    untold = CardSample(90, 30, 4396, 16384.0, {}, {OWN: ProcessLoad(4096, 40, 20), OUTSIDE: ProcessLoad(9)})
    run = run_of(untold, untold)
    record = run.record(RecordKind.INTERIM, 1010.0)
    assert record.untold_s == 2
    assert parse_record(encode_record(record)) == record
    run.add_cards([ALONE], OWNS, {}, 1.0)
    assert run.record(RecordKind.INTERIM, 1010.0).untold_s == 0


def test_somebody_at_work_whom_nobody_sees_is_noticed_and_spoils_no_figure_of_the_job_alone() -> None:
    """A neighbour that leaves the card whenever it is looked at: of 98 % busy nobody seen there has used 45."""
    hidden = card(98, 50, own=(4096, 45, 20))
    run = run_of(*[ALONE] * 30)
    for _ in range(100):
        run.add_cards([hidden], OWNS, {7: None}, 1.0)
    record = run.record(RecordKind.INTERIM, 1200.0)
    assert record.untold_s > UNTOLD_MOST_S
    assert (record.alone_s, record.alone.stats["proc_sm_pct"].mean) == (30, 60)
    run.add_cards([ALONE], OWNS, {7: None}, 1.0, stopped=True)
    assert run.record(RecordKind.INTERIM, 1201.0).untold_s == record.untold_s, "a pause says nothing new"


def test_a_neighbour_that_comes_and_goes_between_looks_is_there() -> None:
    absent = card(80, 50, own=(4096, 45, 20))
    record = run_of(*[SHARED, absent] * 40, neighbours=(7,), elapsed_s=0.5).record(RecordKind.INTERIM, 1100.0)
    assert record.shared.stats["proc_sm_pct"].n >= ENOUGH
    assert record.shared.stats["proc_sm_pct"].mean == 45
    assert "proc_sm_pct" not in record.alone.stats


@pytest.mark.parametrize(
    ("before", "beside"),
    [
        ([card(60, 30, own=(4096, 30, 15))] * 200, [card(60, 30, own=(4096, 30, 15))] * 100),  # the card counts so
        ([], [card(100, 30, own=(4096, 50, 15)), card(0, 0, own=(4096, 50, 15))] * 100),  # bursts
        ([], [SHARED] * 100),
        ([], [card(90, 30, own=(4096, 40, 15), other=(8192, 20, 5))] * 100),  # seen, and so measured
    ],
)
def test_who_is_seen_or_not_at_work_hides_nothing(before: list[CardSample], beside: list[CardSample]) -> None:
    run = run_of(*before)
    for sample in beside:
        run.add_cards([sample], OWNS, {7: None}, 1.0)
    assert run.record(RecordKind.INTERIM, 1400.0).untold_s == 0


def test_activity_alone_and_shared_is_kept_apart() -> None:
    at_the_change = card(95, 55, own=(4096, 60, 30), other=(8192, 20, 10))
    record = run_of(ALONE, at_the_change, SHARED, SHARED, neighbours=(7,)).record(RecordKind.INTERIM, 1010.0)
    assert record.alone.stats["proc_sm_pct"].mean == 60
    assert record.shared.stats["proc_sm_pct"].max == 45, "the second in which the neighbour came is neither"
    assert (record.alone_s, record.shared_s) == (1, 3)
    assert parse_record(encode_record(record)) == record


def test_what_a_neighbour_did_just_before_it_left_is_not_ours() -> None:
    """The card's own rate is an average over the last second."""
    leaving = card(80, 50, own=(4096, 58, 29))
    record = run_of(SHARED, leaving, leaving, ALONE, elapsed_s=0.4).record(RecordKind.FINAL, 1010.0)
    assert record.features.mgup == 60


def test_nothing_counts_before_the_job_is_on_the_card() -> None:
    record = run_of(card(70, 40, other=(8192, 70, 40)), card(0, 0)).record(RecordKind.FINAL, 1010.0)
    assert record.features.mgup is None
    assert record.profile.seconds == 0


def test_a_process_of_unknown_owner_makes_nobody_a_neighbour() -> None:
    record = run_of(card(60, 30, own=(4096, 60, 30), unknown=(10, 0, 0))).record(RecordKind.FINAL, 1010.0)
    assert (record.alone_s, record.shared_s) == (0, 0)


@pytest.mark.parametrize(("neighbours", "mgup"), [((), 60), ((7,), None)])
def test_a_card_that_names_no_processes_is_judged_by_who_was_given_it(
    neighbours: tuple[int, ...], mgup: float | None
) -> None:
    silent = CardSample(60.0, 30.0, 4296.0, 16384.0, {}, None)
    record = run_of(silent, neighbours=neighbours).record(RecordKind.FINAL, 1010.0)
    assert record.features.mgup == mgup
    assert record.shared_s == len(neighbours)


def test_after_the_epoch_the_profile_stays_and_only_activity_goes_on() -> None:
    run = run_of(ALONE)
    run.close_profile(Closed.EPOCH)
    busier = card(99, 80, own=(9000, 99, 80))
    run.add_cards([busier], OWNS, {}, 1.0)
    run.add_host({"cpu_pct": 50.0})
    record = run.record(RecordKind.FINAL, 1010.0)
    assert record.closed is Closed.EPOCH
    assert record.features.mgup == 60
    assert record.features.mem_used_mib == 9000, "whether two jobs fit depends on the peak of the whole run"
    assert record.alone.stats["gpu_util_pct"].max == 99
    assert "cpu_pct" not in record.profile.stats


def test_records_of_a_run_follow_each_other() -> None:
    run = run_of(ALONE)
    first, last = run.record(RecordKind.INTERIM, 1001.0), run.record(RecordKind.FINAL, 1002.0)
    assert first.run_id == last.run_id
    assert first.record_id != last.record_id
    assert (first.seq, last.seq) == (1, 2)
    assert (first.closed, last.closed) == (Closed.OPEN, Closed.END)


def test_the_cards_of_a_gang_are_one_record() -> None:
    """Activity is the mean of the cards; memory that of the fullest, since a neighbour must fit on each."""
    gang = RunSoFar(Identity(1, "n1", 0, others=(1,)), 0.0)
    samples = [card(60, 30, own=(1000, 60, 30)), card(20, 10, own=(3000, 20, 10))]
    for _ in range(3):
        gang.add_cards(samples, OWNS, {}, 1.0)
    record = gang.record(RecordKind.FINAL, 3.0)
    assert (record.gpu_index, record.gpus) == (0, 2)
    assert record.features.gpu_util_mean_pct == pytest.approx(40.0)
    assert record.features.mem_used_mib == 3000.0
    assert parse_record(encode_record(record)) == record


def test_a_gang_shares_as_soon_as_somebody_is_on_one_of_its_cards() -> None:
    gang = RunSoFar(Identity(1, "n1", 0, others=(1,)), 0.0)
    for _ in range(3):
        gang.add_cards([ALONE, SHARED], OWNS, {5: None}, 1.0)
    record = gang.record(RecordKind.FINAL, 3.0)
    assert (record.alone_s, record.shared_s) == (0.0, 3.0)
    assert [neighbour.job_id for neighbour in record.neighbours] == [5]
