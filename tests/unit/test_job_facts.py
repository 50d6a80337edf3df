"""What ``gpushare job`` tells: from the tag alone, and with all that is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from world import job, record

from slurm_gpushare.helper.explain import tell
from slurm_gpushare.node.figures import RunFigures, looks_preallocated, run_figures
from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.protocol.record import Period, Stat
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.text import WIDTH, bar
from slurm_gpushare.report.export import job_json
from slurm_gpushare.report.job_text import PREALLOCATED, job_lines
from slurm_gpushare.report.job_view import History, JobView, from_queue, with_history
from slurm_gpushare.store.published import PublicJob

TOKEN = "gs-" + "a" * 20
NOW = 10_000
SHARER = f"GS1:c=2;t={TOKEN};o=gpu:1;g=n1:3"


def known(tag: str = SHARER, state: str = "RUNNING", **changes: Any) -> JobView:
    start_s = None if state == "PENDING" else NOW - 1000
    queued = {"uid": 1001, "state": state, "reason": "Priority", "nodes": ("n1",), "submit_s": NOW - 1060}
    of_job = {"raw_id", "start_s", "end_s", "cpus"} & changes.keys()
    queued_job = job("14", tag=tag, **queued | {"start_s": start_s} | {name: changes[name] for name in of_job})
    return replace(from_queue(queued_job, NOW), **changes)


def facts(job: JobView | None = None, run: RunFigures | None = None, **history: Any) -> JobView:
    job = job or known()
    runs = {job.raw_id: run} if run else {}
    return with_history(job, History(runs=runs, **history), SitePromises(25, 50))


def text(told: JobView, note: str = "", bars: bool = False) -> str:
    return "\n".join(job_lines(told, (), note, bars))


def beside(guest: int = 14, resident: int = 12, **changes: Any) -> Span:
    span = Span(resident, guest, "", "", "n1", 3, "V100", NOW - 1000, NOW - 600, 0.9, 0.8, 0.85, 0.5)
    return replace(span, **changes)


def test_a_waiting_job_is_told_why_with_numbers_and_what_would_change_it() -> None:
    waits = PublicJob("14", 14, reason="memory", need=9000, have=7200, wait_s=5400)
    said = text(facts(known(state="PENDING"), live=waits))
    assert "it needs 9000 MiB of GPU memory, and beside the best neighbour 7200 MiB" in " ".join(said.split())
    assert "a neighbour that uses less, or a smaller batch" in said
    assert "a start in about 90 min" in said


def test_jobs_outside_sharing_and_probes_are_told_so() -> None:
    assert "takes no part" in text(facts(known("")))
    probe = f"GS1:probe;t={TOKEN}"
    assert "has a whole GPU and is measured" in text(facts(known(probe)))
    assert "waits for a whole GPU, to be measured" in text(facts(known(probe, "PENDING")))
    done = known(probe, "COMPLETED", end_s=NOW)
    assert "had a whole GPU and was measured" in " ".join(text(facts(done, run=RunFigures(gpu_busy_pct=40.0))).split())
    idle = text(facts(done, run=RunFigures(measured_s=5.0)))
    assert "nothing was measured: it used no GPU" in " ".join(idle.split()), "a record without a GPU is no measurement"
    assert "nothing was measured: it used no GPU, or its token is another user's" in " ".join(text(facts(done)).split())
    cancelled = known(probe, "CANCELLED", start_s=None, end_s=NOW)
    assert "was to be measured" in text(facts(cancelled)), "it never started"


def test_an_owner_is_told_of_memory_that_looks_taken_in_advance() -> None:
    full = RunFigures(gpu_mem_peak_mib=15_900, gpu_mem_total_mib=16_384, preallocated=True)
    said = text(facts(known(f"GS1:probe;t={TOKEN}"), run=full))
    assert PREALLOCATED in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= WIDTH
    assert "in advance" not in text(facts(known(f"GS1:probe;t={TOKEN}"), run=replace(full, preallocated=False)))
    assert "in advance" not in text(facts(known(""), run=full)), "who takes no part is told nothing"


@pytest.mark.parametrize(
    ("peak", "mean", "looks"),
    [(97.0, 96.0, True), (75.0, 74.0, True), (97.0, 60.0, False), (50.0, 50.0, False), (None, None, False)],
)
def test_a_constant_and_nearly_whole_allocation_looks_preallocated(
    peak: float | None, mean: float | None, looks: bool
) -> None:
    stats = {} if peak is None or mean is None else {"gpu_mem_pct": Stat(60, peak, mean, 0.0, peak, 1.0)}
    assert run_figures(replace(record(), profile=Period(30.0, 0.0, stats))).preallocated is looks
    assert looks_preallocated(peak, mean) is looks


def test_a_guest_sees_what_sharing_cost_and_spared_it() -> None:
    placed = Decision(14, NOW - 1000, "beside", "n1", 3, 12, reasons={"wait_s": 720.0})
    told = facts(spans=[beside()], decisions=[placed])
    assert told.role == "guest"
    assert told.measured_isd_pct == 25.0  # 400 of 1000 s at half speed: 800 s of work
    said = text(told)
    assert "with job 12 on GPU 3 of n1, as guest: slower by 100 % measured, 25 % expected" in " ".join(said.split())
    assert "over the whole run 25 % measured; promised at most 50 %" in " ".join(said.split())
    assert "a whole GPU was forecast 12 min later" in said


def test_a_pause_is_the_slow_down_of_who_was_paused_and_not_of_its_neighbour() -> None:
    paused = beside(paused_s=200)  # 400 s together, 200 of them in a pause
    guest = facts(known(SHARER + ";q=200"), spans=[paused])
    assert guest.measured_isd_pct == pytest.approx(100 * (1000 / 700 - 1))  # 200 s lost in it, 100 s at half speed
    resident = facts(known(raw_id=12, key="12"), spans=[paused])
    assert resident.measured_isd_pct == pytest.approx(100 * (1000 / 970 - 1))
    assert "its neighbour was paused for it, 3.3 min in all" in " ".join(text(resident).split())
    assert "its neighbour was paused" not in text(guest)


def test_time_is_slurms_which_leaves_out_what_we_suspended_but_not_what_we_stopped() -> None:
    assert facts(known(SHARER + ";q=300;s=100")).elapsed_s == 800
    assert facts(known(f"{SHARER};p={NOW - 50}", state="SUSPENDED", end_s=None)).elapsed_s == 950
    ended = known(f"{SHARER};p={NOW - 250}", end_s=NOW - 200)
    assert facts(ended).elapsed_s == 750, "it ended in its pause"
    assert facts(ended).paused_s == 50


def test_who_came_to_have_the_card_afterwards_is_a_successor_under_a_residents_promise() -> None:
    told = facts(known(SHARER + ";h=1"), spans=[beside()])
    assert (told.role, told.promised_pct) == ("successor", 25)


def test_an_expected_slow_down_is_marked_as_such() -> None:
    said = text(facts(spans=[beside(guest_rate_seen=None)]))
    assert "slower by 25 % expected, not measured" in " ".join(said.split())


def test_the_owners_own_cap_is_the_promise() -> None:
    assert facts(known(SHARER + ";m=10"), spans=[beside()]).promised_pct == 10


def test_a_cap_above_the_sites_is_told_as_what_holds() -> None:
    said = " ".join(text(facts(known(SHARER + ";m=500"))).split())
    assert "slowed by at most 50 %, which holds for all here (its max=500 is more)" in said
    assert "accepts at most 10 % slow-down" in text(facts(known(SHARER + ";m=10")))


def test_use_of_gpu_memory_cpu_and_power_with_bars_on_a_terminal() -> None:
    run = RunFigures(
        "V100", 900, 30, "epoch", 45.0, 4096, 16384, False, 20.0, 0.6, 3000, 180.0, 98.0, 25.0, 40.0, 600, 400
    )
    said = text(facts(run=run), bars=True)
    assert "GPU busy     [█████████...........]  45 %  over 15 min" in said
    assert "GPU memory   [█████...............]  25 %  peak 4.0 of 16.0 GiB" in said
    assert "15 %  0.6 of 4 cores" in said
    assert "180 W of the card, about 50.0 Wh" in said
    assert "at most 98 % busy, 25 % of its memory allocated, 40 % of the time accessing it; first epoch" in " ".join(
        said.split()
    )
    assert "█" not in text(facts(run=run))


def test_what_everybody_may_see_of_a_job_is_told_to_everybody() -> None:
    live = PublicJob("14", 14, card="n1:3", beside=12, expected_isd_pct=10.4)
    said = text(facts(live=live), note="details of a job are for its owner")
    assert "Shares       card n1:3 with job 12: slower by 10 % expected, not measured" in said


def test_what_is_not_known_is_dashes_with_a_note_never_nought() -> None:
    said = text(facts(), note="the helper last published 9 min ago")
    assert "GPU busy       ---  not known" in said
    assert "Note         the helper last published 9 min ago" in said
    assert " 0 %" not in said


def test_time_given_back_and_pauses_are_told() -> None:
    assert "3.0 min of it given back" in text(facts(known(SHARER + ";x=3")))
    paused = PublicJob("14", 14, reason="paused", paused=True)
    said = text(facts(known(f"{SHARER};p={NOW - 90}", "SUSPENDED"), live=paused))
    assert "SUSPENDED, paused" in said
    assert "it goes on by itself" in said


def test_a_neighbour_that_is_an_array_task_is_called_as_its_owner_calls_it() -> None:
    lasting = beside(end_s=None)
    told = facts(spans=[lasting], decisions=[])
    assert "with job 11_3 on" in "\n".join(job_lines(told, (), "", False, {12: "11_3"}))
    live = facts(live=PublicJob("14", 14, "n1:3", 12, 8.0))
    assert "with job 11_3:" in "\n".join(job_lines(live, (), "", False, {12: "11_3"}))
    (line,) = tell("14", [Decision(14, 60, "beside", "n1", 3, 12)], {12: "11_3"})
    assert "placed beside job 11_3" in line


def test_a_stay_that_lasts_is_told_with_what_was_measured_last() -> None:
    newer = PublicJob("14", 14, "n1:3", 12, 8.0, 25.0)
    (stay,) = facts(spans=[beside(end_s=None, guest_rate_seen=None)], live=newer).stays
    assert stay.measured_isd_pct == pytest.approx(25.0)
    (over,) = facts(spans=[beside()], live=newer).stays
    assert over.measured_isd_pct == pytest.approx(100.0), "a stay that is over has its own"


def test_not_measured_yet_is_not_never_measured() -> None:
    assert "not measured yet" in text(facts())
    assert "not measured yet" not in text(facts(known(state="COMPLETED", end_s=NOW)))


def test_a_job_without_a_token_is_told_why_nothing_is_known_of_it() -> None:
    """It is sampled like any other on a shared partition, and its record is dropped."""
    for state in ({}, {"state": "COMPLETED", "end_s": NOW}):
        said = text(facts(known("", **state)))
        assert "GPU busy       ---  it takes no part with a token, so nothing is kept of it" in said
        assert "not measured" not in said
    assert "nothing is kept" not in text(facts())


def test_lines_hold_80_columns() -> None:
    waits = PublicJob("14", 14, reason="place", wait_s=5400)
    for told in (facts(known(state="PENDING"), live=waits), facts(spans=[beside()] * 3)):
        assert max(map(len, text(told, note="word " * 40, bars=True).splitlines())) <= WIDTH


def test_json_has_the_same_and_null_where_nothing_is_known() -> None:
    document = job_json(facts(spans=[beside()]), ["placed"], "why")
    assert document["stays"][0]["beside"] == 12
    assert document["telemetry"] is None
    assert (document["story"], document["note"]) == (["placed"], "why")
    waits = PublicJob("14", 14, reason="memory", need=9000, have=7200, wait_s=5400)
    assert job_json(facts(known(state="PENDING"), live=waits), [], "")["reason"]["code"] == "memory"


def test_a_reason_of_a_later_release_is_left_out() -> None:
    assert facts(known(state="PENDING"), live=PublicJob("14", 14, reason="solar-flare")).why is None


def test_bars_stay_inside_their_ends() -> None:
    assert (bar(-5, 4), bar(50, 4), bar(900, 4)) == ("[....]", "[██..]", "[████]")


def test_decisions_come_with_their_reasons_and_only_the_latest_of_a_kind() -> None:
    decisions = [
        Decision(14, 100, "waits", reasons={"key": "14", "code": "memory", "need": 9000, "have": 1}),
        Decision(14, 200, "waits", reasons={"key": "14", "code": "no-partner", "wait_s": 60}),
        Decision(14, 300, "waits", reasons={"key": "15_1", "code": "place"}),
        Decision(14, 400, "beside", "n1", 3, 12, reasons={"key": "14", "guest_isd_pct": 21.0, "resident_isd_pct": 8.4}),
    ]
    said = "\n".join(tell("14", decisions))
    assert "no card has a sharing job with room beside it" in said
    assert "9000" not in said
    assert "node that the job may use" not in said
    assert "placed beside job 12 (GPU 3 of n1): its neighbour is expected to lose 8 % of its run" in said


def test_a_pause_is_told_in_plain_words_while_it_lasts_and_afterwards() -> None:
    live = PublicJob("14", 14, reason="paused", paused=True)
    said = text(facts(known(f"{SHARER};p={NOW - 90};q=60", "SUSPENDED"), live=live))
    assert said.startswith("Job 14: SUSPENDED, paused on n1")
    assert "it is paused, so that its neighbour gets the speed it was promised" in " ".join(said.split())
    assert "Paused       2.5 min so far" in said
    assert "Paused       60 s in all" in text(facts(known(f"{SHARER};q=60")))


def test_a_job_that_its_administrator_suspended_is_not_said_to_be_paused_by_us() -> None:
    said = text(facts(known(state="SUSPENDED"), live=PublicJob("14", 14)))
    assert "paused" not in said.lower()


def test_a_requeued_job_is_told_by_its_last_run_alone() -> None:
    """It ran for 32 s beside job 12, was paused, was requeued, and has run for 11 s since."""
    earlier = beside(start_s=NOW - 100, end_s=None)
    runs = RunFigures(power_w=200.0, end_s=NOW - 60)
    decisions = [
        Decision(14, NOW - 100, "beside", "n1", 3, 12),
        Decision(14, NOW - 80, "extended", reasons={"given_min": 2}),
    ]
    again = facts(known(start_s=NOW - 11), run=runs, spans=[earlier], decisions=decisions)
    assert (again.stays, again.shared_s, again.run, again.energy_kwh, again.given_back_s) == ((), 0.0, None, None, 0)
    waiting = facts(known(state="PENDING"), run=runs, spans=[earlier], decisions=decisions)
    assert (waiting.stays, waiting.run) == ((), None)


def test_a_job_that_has_ended_shares_with_nobody_though_the_helper_has_not_noticed() -> None:
    ended = facts(known(state="COMPLETED", end_s=NOW - 300), spans=[beside(end_s=None)])
    assert [(stay.end_s, stay.seconds) for stay in ended.stays] == [(NOW - 300, 700)]
    assert "still" not in text(ended)


def test_a_short_stay_is_not_called_measured() -> None:
    long, short = beside(end_s=NOW - 600), beside(start_s=NOW - 600, end_s=NOW - 597, resident=13)
    told = facts(spans=[long, short])
    assert [stay.measured_isd_pct is not None for stay in told.stays] == [True, False]
    assert told.measured_isd_pct is not None, "nearly all of its time was measured"
    assert facts(spans=[short]).measured_isd_pct is None
