from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from world import ALICE, NOW, Site, record, token

from slurm_gpushare.protocol.record import Closed, Period, Stat
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store.refine import combine, features_of, unlike
from slurm_gpushare.store.workloads import LOG_DURATION, Profile

A = token(1)


@pytest.fixture
def site(store_url: str, tmp_path: Path) -> Site:
    site = Site(store_url, tmp_path / "spool")
    site.tags.update({job: OwnedToken(A, ALICE) for job in range(1, 100)})
    return site


def profile(site: Site) -> Profile:
    found = site.store.profiles.get(A)
    assert found is not None
    return found


def test_one_odd_run_does_not_bend_the_profile(site: Site) -> None:
    for job, util in enumerate([50.0, 51.0, 49.0, 60.0, 50.0], start=1):
        site.take(record(job, util=util))
    assert profile(site).features["gpu_util_mean_pct"] == 50.0
    assert profile(site).runs == 5
    assert profile(site).scatter["gpu_util_mean_pct"] == pytest.approx(1.4826)


def test_how_far_whole_runs_differ_in_length_is_kept_as_a_scatter_of_logarithms(site: Site) -> None:
    for job, seconds in enumerate([600.0, 1200.0], start=1):
        site.take(record(job, seconds=seconds))
    assert profile(site).scatter[LOG_DURATION] == pytest.approx(math.log(2) / 2)


def test_a_single_run_has_no_scatter(site: Site) -> None:
    site.take(record(1))
    assert profile(site).scatter == {}


def test_memory_is_the_highest_peak_also_beside_a_neighbour(site: Site) -> None:
    site.take(record(1, mem_mib=4000.0))
    site.take(record(2, mem_mib=3000.0))
    assert profile(site).mem_used_mib == 4000
    site.take(record(3, mem_mib=5000.2, shared=True))
    assert profile(site).mem_used_mib == 5001
    assert profile(site).runs == 2


def test_an_out_of_memory_raises_the_estimate_for_good(site: Site) -> None:
    site.take(record(1, mem_mib=4000.0))
    site.store.workloads.raise_memory(A, 9000)
    site.store.workloads.raise_memory(A, 8000)
    site.take(record(2, mem_mib=4100.0))
    assert profile(site).mem_used_mib == 9000


def test_a_run_much_unlike_the_earlier_ones_starts_anew_and_says_so(site: Site) -> None:
    for job in (1, 2, 3):
        site.take(record(job, util=30.0, mem_mib=9000.0, seconds=600.0))
    site.spool(record(4, util=90.0, mem_mib=2000.0, seconds=900.0))
    summary = site.ingest.run(NOW)
    assert summary.counts["restarted"] == 1
    assert summary.restarts == [
        f"{A}: a run unlike the earlier ones (gpu_util_mean_pct 30 -> 90) starts its profile anew"
    ]
    now = profile(site)
    assert (now.generation, now.runs, now.mem_used_mib, now.duration_s) == (2, 1, 2000, 900.0)
    assert now.features["mgup"] == 90.0


def test_what_scatters_widely_has_a_wider_tolerance() -> None:
    calm = [{"gpu_util_mean_pct": 50.0 + i % 2} for i in range(6)]
    wild = [{"gpu_util_mean_pct": value} for value in (40.0, 60.0, 45.0, 55.0, 48.0, 52.0)]
    new = {"gpu_util_mean_pct": 75.0}
    assert unlike(calm, new) == "gpu_util_mean_pct 50 -> 75"
    assert unlike(wild, new) is None


def test_a_run_that_ended_at_once_says_nothing(site: Site) -> None:
    site.take(record(1, util=50.0, seconds=600.0))
    assert site.take(record(2, util=2.0, seconds=20.0)) == {"final": 1, "kept": 1}
    assert profile(site).runs == 1
    assert len(site.store.runs.of_tokens([A])) == 2


def test_a_shared_run_is_kept_for_learning_but_not_in_the_profile(site: Site) -> None:
    site.take(record(1, util=50.0))
    assert site.take(record(2, util=25.0, shared=True)) == {"final": 1, "kept": 1}
    assert profile(site).features["mgup"] == 50.0
    alone, shared = site.store.runs.of_tokens([A])
    assert (alone.shared_s, shared.shared_s, shared.generation) == (0.0, 600.0, None)
    kept = site.store.runs.record(shared.id)
    assert kept is not None
    assert kept.features.mgup == 25.0


def test_duration_is_the_median_of_whole_jobs_alone(site: Site) -> None:
    for job, seconds in enumerate([500.0, 600.0, 1000.0], start=1):
        site.take(record(job, seconds=seconds))
    site.take(record(9, seconds=5000.0, shared=True))
    assert profile(site).duration_s == 600.0


def test_a_learner_sees_each_run_once_in_the_order_of_settling(site: Site) -> None:
    del site.tags[1]
    site.take(record(1))
    site.take(record(2))
    seen = list(site.store.runs.after(0))
    assert [run.job_id for run in seen] == [2]
    site.tags[1] = OwnedToken(A, ALICE)
    site.ingest.run(NOW + 60)
    assert [run.job_id for run in site.store.runs.after(seen[-1].settled_seq)] == [1]


def test_combining_keeps_what_only_some_runs_measured() -> None:
    combined = combine([{"mgup": 1.0}, {"mgup": 3.0, "power_w_mean": 7.0}])
    assert combined.features == {"mgup": 2.0, "power_w_mean": 7.0}
    assert combined.scatter == {"mgup": pytest.approx(1.4826)}


def test_what_a_run_does_after_its_profile_counts_where_it_is_more() -> None:
    """A job may say at once that its epoch is over, and begin to work then."""
    first, whole = Stat(100, 5.0, 3.0, 0.0, 5.0, 1.0), Stat(300, 99.0, 65.0, 0.0, 99.0, 9.0)
    sly = record(1, util=3.0, closed=Closed.EPOCH)
    sly = replace(sly, profile=Period(50.0, 0.0, {"gpu_util_pct": first}))
    sly = replace(sly, alone=Period(600.0, 0.0, {"gpu_util_pct": whole}))
    found = features_of(sly)
    assert (found["mgup"], found["gpu_util_mean_pct"]) == (99.0, pytest.approx(96.0))
    honest = replace(sly, alone=Period(600.0, 0.0, {"gpu_util_pct": first._replace(n=104)}))
    assert features_of(honest)["gpu_util_mean_pct"] == 3.0
