"""The report's arithmetic, by hand, and its three written forms."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from slurm_gpushare.report.export import CSV_COLUMNS, to_csv, to_json
from slurm_gpushare.report.page import KnowledgeCells, ProfilePoint, render
from slurm_gpushare.report.summary import Promise, Report, Span, Spread, isd_pct, spread, summarise
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.tag import Tag
from slurm_gpushare.store.decisions import Decision

T0 = 1_790_000_000


def job(raw_id: int, start: int, end: int | None, tag: Tag | None, user: str = "ann", submit: int = 0) -> AccountedJob:
    return AccountedJob(
        raw_id=raw_id, key=str(raw_id), cluster="c", uid=1000, user=user, account="acc", partition="gpu", qos="normal",
        state="COMPLETED", submit_s=T0 + submit, eligible_s=T0 + submit, start_s=T0 + start,
        end_s=None if end is None else T0 + end, elapsed_s=(end or 4000) - start, limit_s=None, cpus=1, nodes=("gpu0",),
        gpus=0 if tag else 1, shards=1 if tag else 0, admin_comment=str(tag or ""), tag=tag,
    )  # fmt: skip


def span(resident: int, guest: int, start: int, end: int | None, **rates: float) -> Span:
    ended = None if end is None else T0 + end
    return Span(resident, guest, "gs-r", "gs-g", "gpu0", 1, "V100", T0 + start, ended, **rates)


def summary(jobs: Sequence[AccountedJob], spans: Sequence[Span], decisions: Sequence[Decision] = ()) -> Report:
    return summarise(jobs, spans, decisions, Promise(25, 50), T0, T0 + 4000)


@pytest.fixture
def pair() -> Report:
    """A resident of 2000 s and a guest beside it for 1000 s, at rates 0.8 and 0.5."""
    jobs = [job(1, 0, 2000, Tag(cluster=0)), job(2, 500, 1500, Tag(cluster=2), "bob", submit=200)]
    rates = {"resident_rate": 0.9, "guest_rate": 0.6, "resident_rate_seen": 0.8, "guest_rate_seen": 0.5}
    decision = Decision(2, T0 + 400, "beside", partner_job=1, reasons={"wait_s": 1800.0})
    return summary(jobs, [span(1, 2, 500, 1500, **rates)], [decision])


def test_slow_down_is_over_the_whole_run(pair: Report) -> None:
    resident, guest = pair.jobs
    assert resident.isd_pct == pytest.approx(100 * (2000 / 1800 - 1))
    assert guest.isd_pct == pytest.approx(100)
    assert guest.predicted_isd_pct == pytest.approx(100 * (1 / 0.6 - 1))


def test_saving_is_work_done_less_time_used(pair: Report) -> None:
    assert pair.saved_gpu_h * 3600 == pytest.approx(1000 * (0.8 + 0.5 - 1))
    assert pair.busy_gpu_h * 3600 == pytest.approx(2000)
    assert pair.ps_pct == pytest.approx(100 * 300 / 2300)
    assert {o.user: o.gpu_hours_saved * 3600 for o in pair.owners} == pytest.approx({"ann": 150, "bob": 150})


def test_a_guest_slowed_past_the_cap_is_named(pair: Report) -> None:
    assert [line.job.raw_id for line in pair.past_promise] == [2]


def test_the_owners_own_cap_counts_where_it_is_lower() -> None:
    jobs = [job(1, 0, 2000, Tag(max_isd_pct=10)), job(2, 500, 1500, Tag())]
    found = summary(jobs, [span(1, 2, 500, 1500, resident_rate_seen=0.8, guest_rate_seen=0.9)])
    assert [(line.job.raw_id, line.promised_pct) for line in found.past_promise] == [(1, 10)]


def test_waits_are_told_by_role(pair: Report) -> None:
    assert pair.waits_s["guest"] == Spread(1, 300, 300, 300, 300)
    assert pair.waits_s["no token"] == Spread(0)
    assert pair.wait_avoided_h == 0.5


def test_pairs_of_clusters(pair: Report) -> None:
    (line,) = pair.pairs
    assert (line.resident_cluster, line.guest_cluster, line.spans) == (0, 2, 1)
    assert line.resident_isd_pct == pytest.approx(25)
    assert line.guest_isd_pct == pytest.approx(100)
    assert line.ps_pct == pytest.approx(100 * (1 - 1 / 1.3))


def test_what_was_not_measured_is_unknown_not_zero() -> None:
    jobs = [job(1, 0, 2000, Tag()), job(2, 500, 1500, Tag())]
    found = summary(jobs, [span(1, 2, 500, 1500)])
    assert [line.isd_pct for line in found.jobs] == [None, None]
    assert found.isd_pct == Spread(0)
    assert found.prediction_error_points is None


def test_jobs_still_running_count_up_to_now() -> None:
    jobs = [job(1, 0, None, Tag()), job(2, 3000, None, Tag())]
    found = summary(jobs, [span(1, 2, 3000, None, resident_rate_seen=0.5, guest_rate_seen=0.5)])
    assert found.jobs[0].shared_s == 1000
    assert found.jobs[0].isd_pct == pytest.approx(100 * (4000 / 3500 - 1))


def test_spans_of_jobs_that_were_not_asked_for_are_left_out() -> None:
    found = summary([job(1, 0, 2000, Tag())], [span(1, 2, 500, 1500)])
    assert found.spans == ()
    assert found.shared == 0


def test_an_empty_period_has_a_report() -> None:
    found = summary([], [])
    assert found.ps_pct is None
    assert to_csv(found).splitlines() == [",".join(CSV_COLUMNS)]
    json.dumps(to_json(found), allow_nan=False)
    assert "No GPU was shared" in render(found)


def test_a_job_that_did_no_work_has_no_slow_down() -> None:
    assert isd_pct(100, [(100, 0.0)]) is None


def test_percentiles_are_values_that_occurred() -> None:
    assert spread(range(1, 101)) == Spread(100, 50.5, 50, 95, 100)


def test_csv_and_json_say_the_same(pair: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(pair))))
    document = json.loads(json.dumps(to_json(pair), allow_nan=False))
    assert (document["format"], document["version"]) == ("gpushare-report", 1)
    assert [row["isd_pct"] for row in rows] == [str(entry["isd_pct"]) for entry in document["jobs"]]
    assert rows[0]["partners"] == "2"


def test_page_is_well_formed_and_needs_nothing_from_outside(pair: Report) -> None:
    page = render(pair, [ProfilePoint(50, 40, 1)], [KnowledgeCells("V100", [[5.0, None], [40.0, 90.0]])])
    for fragment in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + fragment.split("</svg>")[0] + "</svg>")
    assert "http" not in page
    assert "<script" not in page
    assert "job 2, cluster 2" in page


def test_text_on_the_page_is_escaped() -> None:
    jobs = [job(1, 0, 2000, Tag(), "<b>"), job(2, 500, 1500, Tag(), "ann")]
    assert "<b>" not in render(summary(jobs, [])).replace("<b>0", "").split("By user")[1]
