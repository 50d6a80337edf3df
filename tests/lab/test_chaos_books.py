"""The books of a chaos run find what they are there to find."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
from gpushare_lab.chaos.books import (
    Books,
    Kill,
    Line,
    SlurmsDoing,
    forgotten_at_kills,
    grown,
    jobs_by_fault,
    over_committed,
    share,
    stays,
    without_end,
)
from gpushare_lab.chaos.fault import Fault
from gpushare_lab.chaos.faults import FAULTS
from gpushare_lab.chaos.site import Vitals
from gpushare_lab.chaos.stream import Mark, Submitted

CALM = Fault("nothing", "calm", lambda site, pause: None)
DOWN = Fault("node down", "slurm", lambda site, pause: None, kills=True)


def mark(what: str, job: int, at_s: float, gpu: int = 0, shards: int = 1, restart: int = 0) -> Mark:
    return Mark(what, str(job), job, restart, at_s, "n0", (gpu,), shards)


def line_of(
    state: str | None, *marks: Mark, fault: Fault = CALM, end_s: float = 30.0, slurms: SlurmsDoing | None = None
) -> Line:
    """What the books say of one job that accounting has in `state`."""
    accounted = {} if state is None else {"7": SimpleNamespace(raw_id=7, state=state, start_s=10, end_s=end_s)}
    job = Submitted("7", "shared", None, 5.0, fault.name, "7")
    lines, _ = jobs_by_fault([CALM, DOWN], [job], accounted, marks, slurms or SlurmsDoing([(100.0, 200.0)]))  # type: ignore[arg-type]
    return next(line for line in lines if line.fault == fault.name)


DONE = (mark("start", 7, 10), mark("end", 7, 30))


def test_a_job_that_ended_well_is_completed() -> None:
    line = line_of("COMPLETED", *DONE)
    assert (line.jobs, line.completed, line.lost, line.duplicated, line.verdict) == (1, 1, 0, 0, "ok")
    assert line.longest_wait_s == 5.0


@pytest.mark.parametrize("state", [None, "FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"])
def test_a_job_without_an_end_of_its_own_is_lost(state: str | None) -> None:
    line = line_of(state, DONE[0])
    assert (line.lost, line.verdict) == (1, "FAILED")


def test_what_slurm_ended_while_a_node_was_down_is_not_lost_but_said() -> None:
    line = line_of("NODE_FAIL", DONE[0], fault=DOWN, end_s=150.0)
    assert (line.ended_by_fault, line.lost) == (1, 0)
    assert line_of("FAILED", DONE[0], fault=DOWN, end_s=250.0).lost == 1


def test_a_job_that_ran_to_its_end_twice_is_noticed() -> None:
    again = (mark("start", 7, 40, restart=1), mark("end", 7, 60, restart=1))
    assert line_of("COMPLETED", *DONE, *again).duplicated == 1


@pytest.mark.parametrize(
    ("state", "end_s", "crashes", "heard"),
    [
        ("COMPLETED", 30.0, [], True),
        ("CANCELLED", 30.0, [], True),
        ("RUNNING", None, [], False),
        ("REQUEUED", 30.0, [], False),
        (None, None, [], False),
        (None, None, [8.0], True),
        ("RUNNING", None, [35.0], True),
        ("RUNNING", None, [60.0], False),
    ],
)
def test_the_books_wait_for_accountings_last_word(
    state: str | None, end_s: float | None, crashes: list[float], heard: bool
) -> None:
    accounted = {} if state is None else {"7": SimpleNamespace(state=state, end_s=end_s)}
    job = Submitted("7", "shared", None, 5.0, CALM.name, "7")
    left = without_end([job], accounted, DONE, SlurmsDoing(crashes=crashes))  # type: ignore[arg-type]
    assert left == ([] if heard else ["7"])


def committed(*marks: Mark, accounted: Collection[object] = ()) -> list[str]:
    return over_committed(stays(marks, accounted))  # type: ignore[arg-type]


def test_cards_with_too_many_are_noticed() -> None:
    two = [mark("start", 1, 0), mark("start", 2, 1)]
    assert committed(*two) == []
    assert committed(*two, mark("start", 3, 2)) == ["n0:0: jobs 1, 2, 3"]
    assert committed(*two, mark("end", 1, 2), mark("start", 3, 3)) == []
    assert committed(mark("start", 1, 0), mark("start", 2, 1, shards=0)) == ["n0:0: jobs 1, 2"]
    assert committed(mark("start", 1, 0), mark("start", 2, 1, gpu=1, shards=0)) == []


def test_of_a_killed_job_accounting_knows_when_it_left_the_card() -> None:
    killed = SimpleNamespace(raw_id=1, start_s=0, end_s=5)
    again = (mark("start", 1, 0.5), mark("start", 2, 1), mark("start", 3, 6), mark("start", 1, 60, gpu=1, restart=1))
    assert committed(*again, accounted=[killed]) == []
    assert committed(*again) == ["n0:0: jobs 1, 2, 3"]


def test_one_thing_that_does_not_hold_is_enough() -> None:
    good = Line("nothing", "calm", jobs=1, completed=1)
    assert Books([good]).sound
    assert not Books([good], open_spans=1).sound
    assert not Books([good], leaked=["n0"]).sound
    assert not Books([good], records_twice=[7]).sound
    assert not Books([good], disagree=["7: 4 and 24 s"]).sound
    assert not Books([good], suspended=1).sound
    assert not Books([Line("x", "store", records_lost=1)]).sound
    assert not Books([Line("x", "store", error="the helper did not recover")]).sound


def test_a_run_in_which_nobody_shared_proves_nothing() -> None:
    good = Line("nothing", "calm", jobs=1, completed=1)
    assert Books([good], spans=3).sound
    assert not Books([good], spans=0).sound


def test_what_a_killed_slurmctld_forgot_is_its_own_doing() -> None:
    again = (mark("start", 7, 200, restart=1), mark("end", 7, 230, restart=1))
    twice = (*DONE, *again)
    assert line_of("COMPLETED", *twice, slurms=SlurmsDoing(crashes=[35.0])).ended_by_fault == 1
    assert line_of("COMPLETED", *twice, slurms=SlurmsDoing(crashes=[60.0])).duplicated == 1
    assert line_of(None, slurms=SlurmsDoing(crashes=[8.0])).ended_by_fault == 1
    assert line_of(None, slurms=SlurmsDoing(crashes=[20.0])).lost == 1


def test_more_than_slurm_forgets_without_us_is_not_its_own_doing() -> None:
    def sound(ended: int, control: int) -> bool:
        return Books([], kills=[Kill(100.0, 8, ended)] * 3, control_kills=[Kill(100.0, 8, control)] * 3).sound

    as_often, far_more_often = [(0, 0), (1, 0), (4, 3), (0, 8)], [(4, 1), (8, 4)]
    assert all(sound(*ended) for ended in as_often)
    assert not any(sound(*ended) for ended in far_more_often)
    assert not Books([], kills=[Kill(100.0, 2, 3)]).sound, "more than there were"
    more = Books([], kills=[Kill(100.0, 10, 9)], control_kills=[Kill(100.0, 10, 1)])
    assert more.as_dict()["forgotten"] == {"with us": "9 of 10 (90 %)", "without us": "1 of 10 (10 %)"}
    assert more.as_dict()["unexplained"] == ["9 of 10 (90 %), without us 1 of 10 (10 %)"]
    assert share([]) == "0 of 0"


def test_what_a_kill_could_have_made_slurm_forget_is_counted() -> None:
    """Of three jobs that came around it one is gone; the fourth came long before and ended long after."""
    jobs = [
        Submitted(raw, "shared", None, at_s, CALM.name, raw) for raw, at_s in zip("7890", (95, 99, 104, 5), strict=True)
    ]
    marks = [mark(what, job, at_s) for job in (8, 9, 0) for what, at_s in (("start", 130), ("end", 150))]
    accounted = {raw: SimpleNamespace(state="COMPLETED", start_s=129, end_s=151) for raw in "890"}
    (kill,) = forgotten_at_kills(jobs, accounted, marks, SlurmsDoing(crashes=[100.0]))  # type: ignore[arg-type]
    assert (kill.jobs, kill.ended) == (3, 1)
    twice = forgotten_at_kills(jobs, accounted, marks, SlurmsDoing(crashes=[100.0, 107.0]))  # type: ignore[arg-type]
    assert [(kill.jobs, kill.ended) for kill in twice] == [(3, 1), (0, 0)], "nobody counts twice"


def test_every_fault_has_a_name_of_its_own_and_every_class_a_short_one() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.group for fault in FAULTS if fault.short} == {fault.group for fault in FAULTS}


def vitals(memory_mib: Collection[float], files: int = 10) -> list[Vitals]:
    return [Vitals(float(at), mib, files, 2) for at, mib in enumerate(memory_mib)]


def test_a_helper_that_warms_up_and_then_stays_is_level() -> None:
    assert grown(vitals([60, 80, 95, 100, 105, 106, 107, 107, 108])) == []
    assert grown(vitals([60, 80, 95, 100, 105, 106, 107, 150, 108])) == [], "a peak is no growth"
    assert grown([]) == []


def test_what_grows_to_the_end_is_named_and_the_run_not_sound() -> None:
    assert grown(vitals([60, 70, 80, 90, 100, 110, 120, 130, 140])) == ["rss_mib: 100 -> 130"]
    leaking = vitals([100] * 6) + vitals([100] * 3, files=40)
    assert grown(leaking) == ["files: 10 -> 40"]
    assert not Books([], grew=grown(leaking)).sound


def test_two_jobs_that_slurm_gave_one_id_are_two_jobs() -> None:
    """A killed slurmctld forgot the first one, and its id went to the second."""
    first, second = (Submitted("7", "shared", None, at_s, CALM.name, own) for own, at_s in (("a", 95.0), ("b", 105.0)))
    marks = [
        Mark("start", "a", 7, 0, 96.0, "n0", (0,), 1),
        Mark("start", "b", 7, 0, 110.0, "n0", (0,), 2),
        Mark("end", "b", 7, 0, 130.0, "n0", (0,), 2),
    ]
    accounted = {"7": SimpleNamespace(raw_id=7, state="COMPLETED", start_s=109, end_s=131)}
    (line,), lost = jobs_by_fault([CALM], [first, second], accounted, marks, SlurmsDoing(crashes=[100.0]))  # type: ignore[arg-type]
    assert (line.jobs, line.completed, line.ended_by_fault, lost) == (2, 1, 1, [])
    assert line.longest_wait_s == 4.0, "that of the second"
    assert over_committed(stays(marks, [], [100.0])) == [], "the first one is Slurm's to end"
    assert over_committed(stays(marks, [])) != [], "without a crash it would be on its card still"


def test_a_job_that_was_on_its_way_to_its_node_when_slurmctld_was_killed_is_forgotten_too() -> None:
    marks = [Mark("start", "a", 7, 0, 101.0, "n0", (0,), 0), Mark("start", "b", 8, 0, 500.0, "n0", (0,), 1)]
    assert over_committed(stays(marks, [], [100.0, 900.0])) == []
    assert over_committed(stays(marks, [], [80.0, 900.0])) != [], "that kill was too long before it"
