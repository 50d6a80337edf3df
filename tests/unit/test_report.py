"""The report's arithmetic, by hand, and its three written forms."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import pytest

from slurm_gpushare.cli.report import report_text
from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.tag import Paused, Tag, parse_tag
from slurm_gpushare.protocol.text import natural
from slurm_gpushare.report import report_page
from slurm_gpushare.report.export import CSV_COLUMNS, to_csv, to_json, to_sacct
from slurm_gpushare.report.job_figures import Distribution, spread, whole_run_isd_pct
from slurm_gpushare.report.job_view import History, JobView
from slurm_gpushare.report.pages import ticks
from slurm_gpushare.report.report_page import (
    accrued,
    shared_by_card,
    stays_by_card,
    stretches,
)
from slurm_gpushare.report.report_page import render_report as render
from slurm_gpushare.report.summary import Report, summarise
from slurm_gpushare.slurm.accounting import AccountedJob

T0 = 1_790_000_000
PROMISE = SitePromises(25, 50)


def job(raw_id: int, start: int, end: int | None, tag: Tag | None, user: str = "ann", submit: int = 0) -> AccountedJob:
    return AccountedJob(
        raw_id=raw_id, key=str(raw_id), slurm_cluster="c", uid=1000, user=user, account="acc", partition="gpu",
        state="COMPLETED", submit_s=T0 + submit, eligible_s=T0 + submit, start_s=T0 + start,
        end_s=None if end is None else T0 + end, elapsed_s=(end or 4000) - start, limit_s=None, cpus=1, nodes=("gpu0",),
        gpus=0 if tag else 1, shards=1 if tag else 0, tag=tag,
    )  # fmt: skip


def span(resident: int, guest: int, start: int, end: int | None, **rates: float) -> Span:
    ended = None if end is None else T0 + end
    return Span(resident, guest, "gs-r", "gs-g", "gpu0", 1, "V100", T0 + start, ended, **rates)


def row(view: JobView) -> AccountedJob:
    assert view.accounted is not None
    return view.accounted


def words(page: str) -> str:
    """The page as it is read."""
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def opening(report: Report) -> str:
    return words(render(report).split('class="result">')[1].split("</header>")[0])


def part(page: str, title: str) -> str:
    """The section of the page under one heading."""
    return page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]


def summary(jobs: Sequence[AccountedJob], spans: Sequence[Span], decisions: Sequence[Decision] = ()) -> Report:
    return summarise(jobs, History(spans, decisions, complete=True), PROMISE, T0, T0 + 4000)


@pytest.fixture
def pair() -> Report:
    """A resident of 2000 s and a guest beside it for 1000 s, at rates 0.8 and 0.5."""
    jobs = [job(1, 0, 2000, Tag(cluster=0)), job(2, 500, 1500, Tag(cluster=2), "bob", submit=200)]
    rates = {"resident_rate": 0.9, "guest_rate": 0.6, "resident_rate_seen": 0.8, "guest_rate_seen": 0.5}
    decision = Decision(2, T0 + 400, "beside", partner_job=1, reasons={"wait_s": 1800.0})
    return summary(jobs, [span(1, 2, 500, 1500, **rates)], [decision])


def test_slow_down_is_over_the_whole_run(pair: Report) -> None:
    resident, guest = pair.jobs
    assert resident.measured_isd_pct == pytest.approx(100 * (2000 / 1800 - 1))
    assert guest.measured_isd_pct == pytest.approx(100)
    assert guest.expected_isd_pct == pytest.approx(100 * (1 / 0.6 - 1))


def test_a_pause_slows_nobody_but_who_was_paused_and_saves_nothing(pair: Report) -> None:
    stood_still = replace(pair.spans[0], paused_s=400)
    jobs = [row(pair.jobs[0]), replace(row(pair.jobs[1]), elapsed_s=600)]  # Slurm leaves suspended time out
    found = summary(jobs, [stood_still])
    assert found.jobs[0].measured_isd_pct == pytest.approx(100 * (2000 / (2000 - 600 * 0.2) - 1))
    assert found.saved_gpu_h * 3600 == pytest.approx(600 * (0.8 + 0.5 - 1))
    assert found.busy_gpu_h * 3600 == pytest.approx(2000)
    assert accrued(found)[-1][1] * 3600 == pytest.approx(600 * (0.8 + 0.5 - 1))


def test_a_pause_by_signal_takes_no_gpu_time_and_slows_who_was_stopped(pair: Report) -> None:
    guest = replace(row(pair.jobs[1]), tag=Tag(cluster=2, paused_before_s=400, stopped_before_s=400))
    found = summary([row(pair.jobs[0]), guest], [replace(pair.spans[0], paused_s=400)])
    assert found.jobs[1].measured_isd_pct == pytest.approx(100 * (1000 / 300 - 1))
    assert found.busy_gpu_h * 3600 == pytest.approx(2000)
    left_behind = replace(guest, tag=Tag(cluster=2, paused=Paused(T0 + 1400)))  # it ended in its pause, at T0 + 1500
    assert summary([row(pair.jobs[0]), left_behind], pair.spans).paused_s == 100


def test_saving_is_work_done_less_time_used(pair: Report) -> None:
    assert pair.saved_gpu_h * 3600 == pytest.approx(1000 * (0.8 + 0.5 - 1))
    assert pair.busy_gpu_h * 3600 == pytest.approx(2000)
    assert pair.ps_pct == pytest.approx(100 * 300 / 2300)
    assert {o.user: o.gpu_hours_saved * 3600 for o in pair.owners} == pytest.approx({"ann": 150, "bob": 150})


def test_a_guest_slowed_past_the_cap_is_named(pair: Report) -> None:
    assert [line.raw_id for line in pair.past_promise] == [2]


def test_the_owners_own_cap_counts_where_it_is_lower() -> None:
    jobs = [job(1, 0, 2000, Tag(max_isd_pct=10)), job(2, 500, 1500, Tag())]
    found = summary(jobs, [span(1, 2, 500, 1500, resident_rate_seen=0.8, guest_rate_seen=0.9)])
    assert [(line.raw_id, line.promised_pct) for line in found.past_promise] == [(1, 10)]


def test_waits_are_told_by_role(pair: Report) -> None:
    assert pair.waits_s["guest"] == Distribution(1, 300, 300, 300, 300)
    assert pair.waits_s["no token"] == Distribution(0)


def test_pairs_of_clusters(pair: Report) -> None:
    (line,) = pair.pairs
    assert (line.resident_cluster, line.guest_cluster, line.spans) == (0, 2, 1)
    assert line.resident_isd_pct == pytest.approx(25)
    assert line.guest_isd_pct == pytest.approx(100)
    assert line.ps_pct == pytest.approx(100 * (1 - 1 / 1.3))


def test_what_was_not_measured_is_unknown_not_zero() -> None:
    jobs = [job(1, 0, 2000, Tag()), job(2, 500, 1500, Tag())]
    found = summary(jobs, [span(1, 2, 500, 1500)])
    assert [line.measured_isd_pct for line in found.jobs] == [None, None]
    assert found.isd_pct == Distribution(0)
    assert found.prediction_error_points is None


def test_jobs_still_running_count_up_to_now() -> None:
    jobs = [job(1, 0, None, Tag()), job(2, 3000, None, Tag())]
    found = summary(jobs, [span(1, 2, 3000, None, resident_rate_seen=0.5, guest_rate_seen=0.5)])
    assert found.jobs[0].shared_s == 1000
    assert found.jobs[0].measured_isd_pct == pytest.approx(100 * (4000 / 3500 - 1))


def test_a_users_own_job_has_shared_with_a_job_that_is_not_in_the_report() -> None:
    found = summary(
        [job(1, 0, 2000, Tag())], [span(1, 2, 500, 1500, resident_rate_seen=0.8, guest_rate_seen=0.5), span(8, 9, 0, 1)]
    )
    (line,) = found.jobs
    assert (line.role, line.neighbours, len(found.spans)) == ("resident", (2,), 1)
    assert found.saved_gpu_h * 3600 == pytest.approx(150)  # half of what the two saved
    assert found.busy_gpu_h * 3600 == 1500


def test_where_nobody_knows_who_shared_no_figure_about_it_is_given() -> None:
    jobs = [job(1, 0, 2000, Tag()), job(2, 0, 2000, None, "bob")]
    found = summarise(jobs, History(), PROMISE, T0, T0 + 4000)
    assert [line.role for line in found.jobs] == ["unknown", "no token"]
    document = to_json(found)["summary"]
    assert [document[name] for name in ("shared", "past_promise", "saved_gpu_h")] == [None, None, None]
    assert [user["shared"] for user in to_json(found)["users"]] == [None, None]
    page, said = render(found), report_text(found)
    assert "not known" in page
    for text in (page, said):
        assert "By user" not in text, "0 would be an untruth"
        assert ">0 s<" not in text


def test_successors_are_told_apart_and_their_waits_were_forecast() -> None:
    jobs = [job(1, 0, 2000, Tag()), job(2, 500, 3000, Tag(successor=True))]
    placed = Decision(2, T0 + 500, "succeeds", partner_job=1, reasons={"wait_s": 900.0})
    found = summary(jobs, [span(1, 2, 500, 2000)], [placed])
    assert [(line.role, line.promised_pct) for line in found.jobs] == [("resident", 25), ("successor", 25)]
    assert [line.wait_forecast_s for line in found.jobs] == [None, 900.0]


def test_a_task_placed_under_its_arrays_id_has_its_forecast_too() -> None:
    tasks = [replace(job(raw, 500, 1500, Tag(cluster=2)), key=key) for raw, key in ((34, "34_1"), (35, "34_0"))]
    placed = [
        Decision(34, T0 + 400, "beside", partner_job=n, reasons={"key": key, "wait_s": wait_s})
        for n, key, wait_s in ((1, "34_0", 1800.0), (2, "34_1", 600.0))
    ]
    rates = {"resident_rate": 0.9, "guest_rate": 0.6}
    residents = [job(n, 0, 2000, Tag(cluster=0)) for n in (1, 2)]
    spans = [span(1, 35, 500, 1500, **rates), span(2, 34, 500, 1500, **rates)]
    report = summary([*residents, *tasks], spans, placed)
    assert {line.key: line.wait_forecast_s for line in report.jobs[2:]} == {"34_1": 600.0, "34_0": 1800.0}


def test_figures_say_of_how_many_and_expected_ones_are_told_apart() -> None:
    jobs = [job(n, 0, 2000, Tag()) for n in (1, 2, 3, 4)]
    spans = [
        span(1, 2, 500, 1500, resident_rate=0.9, guest_rate=0.9, resident_rate_seen=0.8, guest_rate_seen=0.8),
        span(3, 4, 500, 1500, resident_rate=0.9, guest_rate=0.9),
    ]
    runs = {1: RunFigures(gpu_busy_pct=40, power_w=100), 2: RunFigures(gpu_busy_pct=60, power_w=100)}
    found = summarise(jobs, History(spans, runs=runs, complete=True), PROMISE, T0, T0 + 4000)
    assert (found.isd_pct.count, found.expected_isd_pct.count, found.predictions) == (2, 2, 2)
    assert found.gpu_busy_pct == 50
    assert (found.gpu_busy_shared_pct or 0) > 50
    assert found.energy_kwh == pytest.approx(2 * 100 * 1500 / 3.6e6)


def test_an_empty_period_has_a_report() -> None:
    found = summary([], [])
    assert found.ps_pct is None
    assert to_csv(found).splitlines() == [",".join(CSV_COLUMNS)]
    json.dumps(to_json(found), allow_nan=False)
    assert "No GPU job ran in this period" in render(found)


def test_the_page_opens_with_the_result_in_words(pair: Report) -> None:
    assert opening(pair).startswith("2 of 2 GPU jobs shared a card: 5.0 min of GPU time saved")
    page = words(render(pair))
    assert "What was saved? 5.0 min of GPU time, 13 % of what the jobs that shared would have taken" in page
    assert "How long did jobs wait? 5.0 min at the median of 1 job that joined a card" in page
    assert "Who was harmed? 1 of 2 jobs slowed by more than promised; half ran at most 11 % longer than alone" in page
    assert "How sure is that? 100 % of the time that two jobs had a card was measured" in page
    unknown = summarise([job(1, 0, 100, Tag(cluster=0))], History(), PROMISE, T0, T0 + 4000)
    assert "not known" in opening(unknown)
    assert "No GPU job ran" in opening(summary([], []))


def test_how_good_forecasts_were_is_a_figure() -> None:
    told = [Decision(n, T0, "waits", reasons={"code": "gpus", "wait_s": 400.0}) for n in (1, 2)]
    found = summary([job(1, 500, 2000, Tag()), job(2, 300, 1500, Tag())], [], told)
    assert (found.forecast_error_s.count, found.forecast_error_s.max) == (2, 100)


def test_savings_are_booked_while_a_stay_lasts(pair: Report) -> None:
    points = accrued(pair)
    assert points[0] == (T0 + 500, 0.0)
    assert points[-1] == (T0 + 1500, pytest.approx(300 / 3600))


def test_saved_and_used_gpu_time_are_drawn_over_the_same_time(pair: Report) -> None:
    clock = re.compile(r'class="tick">(\d\d:\d\d)<')
    used, saved = (clock.findall(part(render(pair), title)) for title in ("GPU time", "GPU time saved"))
    assert used == saved
    assert len(used) > 4


def test_the_cards_of_all_nodes_are_drawn_over_the_same_time(pair: Report) -> None:
    at_s = pair.spans[0].start_s + 2200
    elsewhere = replace(pair.spans[0], resident_job=3, guest_job=4, node="gpu1", start_s=at_s, end_s=at_s + 1000)
    later = [job(3, 2500, 3900, Tag(cluster=0)), job(4, 2600, 3800, Tag(cluster=1))]
    page = part(render(summary([*map(row, pair.jobs), *later], [*pair.spans, elsewhere])), "Card by card")
    first, second = (re.findall(r'class="tick">(\d\d:\d\d)<', node) for node in page.split("<details")[1:])
    assert first == second


def test_an_axis_is_never_left_with_a_single_number() -> None:
    assert ticks(0, 8.01, 4) == [0, 2, 4, 6, 8]
    assert all(len(ticks(0, high / 10, 4)) >= 3 for high in range(1, 2000))


def test_before_anybody_shares_the_page_has_no_tiles_of_noughts(pair: Report) -> None:
    nobody = render(summary([job(1, 0, 2000, Tag(cluster=0))], []))
    assert 'class="figures"' not in nobody
    assert "The one GPU job of this period did not share a card" in nobody
    assert 'class="figures"' in render(pair)


def test_savings_are_drawn_within_the_period_alone(pair: Report) -> None:
    cut = replace(pair, start_s=T0 + 700, end_s=T0 + 1200)
    points = accrued(cut)
    assert points[0] == (T0 + 700, 0.0)
    assert points[-1] == (T0 + 1200, pytest.approx(150 / 3600))
    assert "Only what accrued within the period is drawn" in render(cut)
    assert "Only what accrued within the period is drawn" not in render(pair)
    assert accrued(replace(pair, end_s=T0 + 400)) == [], "nobody shared yet"


def test_gpu_time_is_spread_over_the_period_and_none_is_lost(pair: Report) -> None:
    found = stretches(pair)
    assert sum(item.shared_h for item in found) * 3600 == pytest.approx(1000)
    assert sum(item.alone_h for item in found) * 3600 == pytest.approx(1000)
    assert len(found) >= 10


def test_very_many_jobs_make_a_page_of_bounded_size() -> None:
    jobs = [job(n, n % 900 * 100, n % 900 * 100 + 50, Tag()) for n in range(1, 20_001)]
    spans = [
        span(n, n + 1, n % 900 * 100, n % 900 * 100 + 50, resident_rate=0.9, guest_rate=0.9)
        for n in range(1, 20_000, 2)
    ]
    page = render(summarise(jobs, History(spans, complete=True), PROMISE, T0, T0 + 90_000))
    assert len(page) < 3_000_000
    assert "Nodes with very many jobs" in page


def test_nodes_are_sorted_as_people_count() -> None:
    assert sorted(["gpu10", "gpu9", "gpu1a"], key=natural) == ["gpu1a", "gpu9", "gpu10"]


def test_a_job_that_did_no_work_has_no_slow_down() -> None:
    assert whole_run_isd_pct(100, [(100, 0.0)]) is None


def test_percentiles_are_values_that_occurred() -> None:
    assert spread(range(1, 101)) == Distribution(100, 50.5, 50, 95, 100)


def test_csv_and_json_say_the_same(pair: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(pair))))
    document = json.loads(json.dumps(to_json(pair), allow_nan=False))
    assert (document["format"], document["version"]) == ("gpushare-report", 2)
    assert [row["isd_pct"] for row in rows] == [str(entry["isd_pct"]) for entry in document["jobs"]]
    assert rows[0]["partners"] == "2"


def test_gpu_hours_of_a_card_that_two_have_are_counted_once_where_accounting_counts_none(pair: Report) -> None:
    whole, of_2205 = job(3, 0, 900, None), replace(job(4, 0, 900, None), gpus=0, shards=2)
    found = summary([*map(row, pair.jobs), whole, of_2205], pair.spans)
    assert found.accounted_gpu_h * 3600 == pytest.approx(900)
    assert found.gpu_h * 3600 == pytest.approx(2000 + 900 + 900)
    assert "GPU hours         15 min as accounting sees them, 63 min as they were" in report_text(found)


def test_rows_for_other_tools_are_as_sacct_writes_them_with_fractions_of_gpus(pair: Report) -> None:
    tres = "billing=1,cpu=1,gres/shard:v100_1=1,gres/shard=1,mem=8G,node=1"
    jobs = [replace(row(view), tres=tres) for view in pair.jobs] + [replace(job(3, 0, None, None), tres="gres/gpu=1")]
    rows = list(csv.DictReader(io.StringIO(to_sacct(summary(jobs, pair.spans))), delimiter="|"))
    half = "billing=1,cpu=1,gres/gpu={},mem=8G,node=1"
    assert [one["AllocTRES"] for one in rows] == [half.format("0.75"), half.format("0.5"), "gres/gpu=1"]
    assert [one["ElapsedRaw"] for one in rows] == ["2000", "1000", "4000"]
    assert (rows[1]["JobID"], rows[1]["User"], rows[1]["NodeList"], rows[1]["NNodes"]) == ("2", "bob", "gpu0", "1")
    assert rows[2]["End"] == "Unknown"
    assert datetime.fromisoformat(rows[1]["Start"]).timestamp() == T0 + 500
    nobody_knows = to_sacct(summarise(jobs[:1], History(), PROMISE, T0, T0 + 4000))
    assert nobody_knows.splitlines()[1].endswith(f"|{tres}")


def test_partners_are_named_as_their_rows_are() -> None:
    jobs = [job(1, 0, 2000, Tag()), replace(job(34, 500, 1500, Tag()), key="33_1")]
    found = summary(jobs, [span(1, 34, 500, 1500), span(1, 77, 1500, 1900)])
    assert [row["partners"] for row in csv.DictReader(io.StringIO(to_csv(found)))] == ["33_1 ---", "1"]


def test_a_neighbour_that_the_site_hides_is_unknown_not_job_0() -> None:
    found = summary([job(2, 500, 1500, Tag(cluster=2))], [span(0, 2, 500, 1500)])
    assert [line["partners"] for line in to_json(found)["jobs"]] == [[None]]
    (row,) = csv.DictReader(io.StringIO(to_csv(found)))
    assert row["partners"] == "---"
    assert found.shared == 1


def test_page_is_well_formed_and_needs_nothing_from_outside(pair: Report) -> None:
    page = render(pair, [(50, 40, 1, "cluster 1")], [("V100", [[5.0, None], [40.0, 90.0]])])
    for fragment in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + fragment.split("</svg>")[0] + "</svg>")
    assert "http" not in page
    assert "<script" not in page
    assert "job 2, guest, cluster 2" in page
    assert page.count('role="img"') == page.count("<svg")
    assert page.count("aria-label") >= page.count("<svg")


def test_text_on_the_page_is_escaped() -> None:
    jobs = [job(1, 0, 2000, Tag(), "<b>"), job(2, 500, 1500, Tag(), "ann")]
    assert "<b>" not in render(summary(jobs, [])).replace("<b>0", "").split("By user")[1]


def test_a_card_of_many_jobs_is_told_by_how_much_of_the_time_it_was_shared(
    pair: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "MAX_BARS", 1)
    page = part(render(pair), "Card by card")
    assert "Node gpu0: 2 jobs on 1 shared GPU" in page
    assert "<path " in page
    found, shares = shared_by_card(pair)
    (of_card,) = shares.values()
    hours = sum(share * (stretch.end_s - stretch.start_s) for share, stretch in zip(of_card, found, strict=True)) / 3600
    assert hours == pytest.approx(1000 / 3600)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_letters_and_pictures_stand_out_from_the_paper_in_light_and_dark() -> None:
    light, dark = render(summary([], [])).split("prefers-color-scheme: dark", 1)
    colours = dict(re.findall(r"--(\w+): (#\w+)", light))
    for scheme in (colours, colours | dict(re.findall(r"--(\w+): (#\w+)", dark))):
        for name in ("ink", "soft", "bad", "accent"):
            assert _contrast(scheme[name], scheme["paper"]) >= 4.5, f"{name}: letters, WCAG 1.4.3"
        for name in ("good", "rest", "grey", "heat", "c0", "c1", "c2", "c3", "c4", "c5"):
            assert _contrast(scheme[name], scheme["paper"]) >= 3, f"{name}: parts of pictures, WCAG 1.4.11"


def test_what_was_given_back_and_paused_is_told() -> None:
    tag = parse_tag("GS1:c=0;t=gs-r;o=gpu:1;x=3")
    rates = {"resident_rate": 0.9, "guest_rate": 0.9, "resident_rate_seen": 0.9, "guest_rate_seen": 0.9}
    jobs = [job(1, 0, 2000, tag), job(2, 500, 1500, Tag(cluster=0, paused_before_s=120))]
    stood, went_on = Decision(2, T0 + 600, "paused", partner_job=1), Decision(2, T0 + 720, "resumed")
    full = Decision(2, T0 + 1490, "out-of-memory", partner_job=1, reasons={"mem_mib": 9000})
    found = summary(jobs, [span(1, 2, 500, 1500, **rates)], [stood, went_on, full])
    assert (found.given_back_s, found.given_back_jobs, found.pauses, found.out_of_memory) == (180, 1, 1, 1)
    said = words(render(found))
    assert "neighbours were paused 1 time, 2.0 min in all, and 3.0 min were added to the time limits of 1 job." in said


def test_jobs_that_share_a_card_are_drawn_one_above_the_other() -> None:
    jobs = [job(1, 1, 1000, Tag(cluster=0)), job(2, 500, 2000, Tag(cluster=1)), job(3, 1000, 1500, Tag(cluster=2))]
    found = summary(jobs, [span(1, 2, 500, 1000), span(2, 3, 1000, 1500)])
    (stays,) = stays_by_card(found).values()
    assert [stay.lane for stay in stays] == [0, 1, 0], "who stays when the resident ends keeps its lane"
