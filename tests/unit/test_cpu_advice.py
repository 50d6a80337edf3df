"""What ``gpushare job`` and ``report`` say of a job's CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_job_facts import facts, known, text
from test_report import PROMISE, T0, job

from slurm_gpushare.cli.report import report_text
from slurm_gpushare.node.figures import CpuAdvice, RunFigures, cpu_advice
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.report.export import job_json, to_json
from slurm_gpushare.report.job_figures import CpuSummary
from slurm_gpushare.report.job_view import History
from slurm_gpushare.report.summary import summarise

STARVED = RunFigures(measured_s=600, gpu_busy_pct=45.0, cpu_cores=3.9)
SPARE = RunFigures(measured_s=600, gpu_busy_pct=90.0, cpu_cores=1.2)


def test_more_cpus_where_all_are_busy_and_the_gpu_is_not() -> None:
    assert cpu_advice(4, STARVED) == CpuAdvice(8, 3.9, gpu_waits=True)


def test_never_more_than_four_times_as_many_from_one_run() -> None:
    assert cpu_advice(4, replace(STARVED, gpu_busy_pct=2.0)) == CpuAdvice(16, 3.9, gpu_waits=True)


def test_fewer_cpus_with_room_for_bursts_where_most_are_idle() -> None:
    assert cpu_advice(8, SPARE) == CpuAdvice(2, 1.2, gpu_waits=False)


@pytest.mark.parametrize(
    ("cpus", "run"),
    [
        (4, None),
        (4, replace(STARVED, cpu_cores=None)),
        (4, replace(STARVED, gpu_busy_pct=None)),
        (4, replace(STARVED, gpu_busy_pct=80.0)),
        (4, replace(STARVED, measured_s=30)),
        (4, replace(STARVED, shared_s=300)),
        (1, replace(SPARE, cpu_cores=0.1)),
        (2, replace(SPARE, cpu_cores=1.0)),
        (0, SPARE),
    ],
)
def test_no_advice_where_it_fits_or_too_little_is_known(cpus: int, run: RunFigures | None) -> None:
    assert cpu_advice(cpus, run) is None


def test_the_owner_is_told_in_words_and_in_json() -> None:
    told = facts(run=STARVED)
    assert "all 4 are busy and the GPU waits for them: more would help, 8 perhaps (-c 8)" in " ".join(
        text(told).split()
    )
    assert job_json(told, (), "")["cpu_advice"] == {"cpus": 8, "used": 3.9, "gpu_waits": True}
    spare = " ".join(text(facts(known(cpus=8), run=SPARE)).split())
    assert "8 asked for, 1.2 used: 2 would do (-c 2)" in spare
    assert job_json(facts(), (), "")["cpu_advice"] is None


def test_the_report_adds_them_up() -> None:
    jobs = [replace(job(number, 0, 3600, Tag(cluster=0)), cpus=cpus) for number, cpus in ((1, 4), (2, 8), (3, 1))]
    runs = {1: STARVED, 2: SPARE, 3: replace(SPARE, cpu_cores=None)}
    report = summarise(jobs, History(runs=runs, complete=True), PROMISE, T0, T0 + 4000)
    assert report.cpus == CpuSummary(judged=2, short=1, spare=1, spare_cpu_h=6.0)
    assert to_json(report)["summary"]["cpus"]["spare_cpu_h"] == 6.0
    said = " ".join(report_text(report).split())
    assert "of 2 jobs measured the GPUs of 1 wait for more of them and 1 have some to spare, 6 CPU hours in all" in said
