"""``gpushare assess`` and published traces: what is read, how it is dealt, and what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpushare_lab.peers.trace_jobs import make_workload, read_any_trace

from slurm_gpushare.cli import assess as command
from slurm_gpushare.cli.main import main
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.whatif.assess import PastJob, assess_partition, deal, most_in_use, past_job, shipped_pairs
from slurm_gpushare.whatif.traces import read_jobs

OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-0,12000,16384,1,460,,LS,Succeeded,100,700,160
pod-1,6000,12288,1,1000,,LS,Running,50,650,50
pod-2,6000,12288,8,1000,,LS,Running,60,80,
pod-3,4000,1000,0,0,,LS,Running,60,80,60
"""
PAI = """j1,worker,1.0,Terminated,100.0,400.0,600.0,29.3,50.0,T4
j2,worker,4.0,Terminated,50.0,90.0,600.0,29.3,100.0,V100
j3,ps,1.0,Terminated,50.0,90.0,600.0,29.3,,
j4,worker,2.0,Running,50.0,,600.0,29.3,100.0,V100
"""
PHILLY = [
    {
        "status": "Pass",
        "vc": "6c71",
        "jobid": "application_1",
        "attempts": [
            {
                "start_time": "2017-10-09 07:02:29",
                "end_time": "2017-10-09 07:12:29",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
            }
        ],
        "submitted_time": "2017-10-09 07:00:00",
        "user": "u1",
    },
    {"status": "Killed", "vc": "6c71", "jobid": "application_2", "attempts": [], "submitted_time": "None", "user": "u"},
]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_openb_pods_with_fractions_of_a_card(tmp_path: Path) -> None:
    jobs = read_jobs(written(tmp_path, OPENB))
    assert [(job.submit_s, job.duration_s, job.gpus, job.fraction) for job in jobs] == [
        (50, 600, 1, 1.0),
        (60, 20, 8, 1.0),
        (100, 540, 1, 0.46),
    ]


HEADER = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"


@pytest.mark.parametrize("header", ["", HEADER])
def test_pai_tasks_with_and_without_a_header(tmp_path: Path, header: str) -> None:
    jobs = read_jobs(written(tmp_path, header + PAI))
    assert [(job.duration_s, job.gpus, job.fraction) for job in jobs] == [(40, 4, 1.0), (300, 1, 0.5)]


def test_phillys_log(tmp_path: Path) -> None:
    (job,) = read_jobs(written(tmp_path, json.dumps(PHILLY)))
    assert (job.duration_s, job.gpus, job.group) == (600, 2, "6c71")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "[1, 2]", "{", '[{"attempts": 3}]', "\x00\x01"])
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput):
        read_jobs(written(tmp_path, text))


def test_jobs_whose_fractions_do_not_fit_together_never_share(tmp_path: Path) -> None:
    rows = "".join(f"{n},1000,{share}\n" for n, share in enumerate((0.25, 0.75, 0.5, 1)))
    trace = read_any_trace(written(tmp_path, "submit_s,duration_s,num_gpus\n" + rows))
    work = make_workload(trace, shipped_pairs(), gpus=2, jobs=None, load=0, seed=0)
    kinds = work.profile
    can_share = np.isfinite(work.pairs.rate[np.ix_(kinds, kinds)])
    assert not can_share[1, 2]
    assert not can_share[3].any()


def past(count: int, **changes: Any) -> list[PastJob]:
    return [PastJob("gpu", 60.0 * n, 1800.0, 1, f"u{n % 5}", 0.0, **changes) for n in range(count)]


def test_the_number_of_gpus_is_the_most_in_use_at_once() -> None:
    assert most_in_use(past(100)) == 30
    assert most_in_use([PastJob("gpu", 0, 10, 4), PastJob("gpu", 10, 10, 4)]) == 4


@pytest.mark.slow
def test_a_crowded_partition_gains_and_says_how_much_as_a_band() -> None:
    jobs = [replace(job, duration_s=300.0 * (1 + n * 37 % 11) ** 2) for n, job in enumerate(past(300))]
    found = assess_partition("gpu", jobs, gpus=8, draws=3)
    assert found.gpu_hours == pytest.approx(sum(job.duration_s for job in jobs) / 3600)
    assert 0 < found.saved_gpu_h.low <= found.saved_gpu_h.middle <= found.saved_gpu_h.high < found.gpu_hours / 2
    assert found.wait_s.high < found.plain_wait_s
    assert 0 < found.shared_pct.middle <= 100


def test_where_nobody_takes_part_nothing_is_gained() -> None:
    found = assess_partition("gpu", past(100), gpus=8, draws=2, opt_in_pct=0.0)
    assert abs(found.saved_gpu_h.high) < 1e-6
    assert found.shared_pct.high == 0


def test_a_users_jobs_are_a_few_workloads_in_every_draw() -> None:
    work = deal(past(200), shipped_pairs(), 8, 1, 100.0)
    assert len(set(work.profile[::5].tolist())) <= 3
    assert (deal(past(200), shipped_pairs(), 8, 2, 100.0).profile != work.profile).any()


def accounted(n: int, partition: str = "gpu") -> AccountedJob:
    return AccountedJob(
        raw_id=n, key=str(n), slurm_cluster="c", uid=1, user=f"u{n % 3}", account="a", partition=partition,
        state="COMPLETED", submit_s=60 * n, eligible_s=60 * n, start_s=60 * n + 30, end_s=60 * n + 1830, elapsed_s=1800,
        limit_s=3600, cpus=1, nodes=("n",), gpus=1, shards=0, tag=None,
    )  # fmt: skip


class Sacct:
    """Answers every piece of the period with the same jobs."""

    def __init__(self, jobs: list[AccountedJob]) -> None:
        self.jobs, self.queries = jobs, []  # type: ignore[var-annotated]

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        self.queries.append(query)
        return self.jobs


def test_a_year_is_asked_for_in_pieces_and_no_job_counts_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sacct = Sacct([accounted(n) for n in range(1, 120)] + [accounted(n, "big") for n in range(500, 560)])
    monkeypatch.setattr(command, "connect", lambda: sacct)
    page = tmp_path / "page.html"
    arguments = ["assess", "-S", "now-365days", "--draws", "2", "--gpus", "4", "--json", "--html", str(page)]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert len(sacct.queries) == 12
    assert {item["partition"]: item["jobs"] for item in document["partitions"]} == {"big": 60, "gpu": 119}
    assert document["partitions"][0]["observed_wait_s"] == 30
    text = page.read_text()
    assert "less GPU time</b>" in text
    assert "http" not in text


class SlowSacct(Sacct):
    """Gives up on more than ten days at once."""

    def accounting(self, query: AccountingQuery) -> list[AccountedJob]:
        days = (datetime.fromisoformat(query.end) - datetime.fromisoformat(query.start)).days
        if days > 10:
            raise ControllerDown(f"sacct: no answer within 30 s for {days} days")
        return super().accounting(query)


def test_the_usual_question_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sacct = Sacct([accounted(n) for n in range(1, 9)])
    monkeypatch.setattr(command, "connect", lambda: sacct)
    with pytest.raises(SystemExit):
        main(["assess", "--draws", "1", "--gpus", "4"])
    assert len(sacct.queries) == 1


def test_what_slurmdbd_cannot_answer_in_time_is_asked_for_in_halves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sacct = SlowSacct([accounted(n) for n in range(1, 9)])
    monkeypatch.setattr(command, "connect", lambda: sacct)
    with pytest.raises(SystemExit) as ended:
        main(["assess", "--draws", "1", "--gpus", "4", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["partitions"][0]["jobs"] == 8
    times = [(query.start, query.end) for query in sacct.queries]
    assert len(times) == 4
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]], "nothing in between is left out"


def test_a_machine_without_the_simulator_is_told_what_to_install() -> None:
    program = "import sys; sys.modules['numpy'] = None; from slurm_gpushare.cli.main import main; main(['assess'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "slurm-gpushare-controller" in done.stderr
    assert "pip install 'slurm-gpushare[controller]'" in done.stderr


def test_the_table_holds_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "connect", lambda: Sacct([accounted(n) for n in range(1, 60)]))
    with pytest.raises(SystemExit):
        main(["assess", "--draws", "2", "--gpus", "3"])
    table = capsys.readouterr().out.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 80


def test_a_site_without_gpus_in_its_accounting_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "connect", lambda: Sacct([]))
    with pytest.raises(SystemExit) as ended:
        main(["assess"])
    assert ended.value.code == 2
    assert "AccountingStorageTRES" in capsys.readouterr().err


def test_where_nobody_waits_it_is_said_that_nobody_shares_and_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path, "submit_s,duration_s,num_gpus\n0,600,1\n10,600,1\n")
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["assess", "--draws", "2", "--trace", str(trace), "--html", str(page)])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on 2 GPUs nobody waits, so that nobody shares" in said
    assert "--gpus" in said
    assert "0 s of 20 min, 0 %" in said, "20 minutes are not 0 h"
    assert said.split("ISD% ")[1].split(" GPU time")[0].endswith("---"), "of nobody slow-down is unknown, not 0"
    assert "would have shared a card: " in page.read_text()


@pytest.mark.parametrize("row", ["1,1e300,1", "1,60,1000000000"])
def test_a_job_that_cannot_be_is_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str) -> None:
    trace = written(tmp_path, f"submit_s,duration_s,num_gpus\n{row}\n")
    with pytest.raises(SystemExit) as ended:
        main(["assess", "--trace", str(trace)])
    assert ended.value.code == 2
    assert "cannot be" in capsys.readouterr().err


def test_on_a_site_that_shares_cards_are_counted_and_not_sharers() -> None:
    sharers = [past_job(replace(accounted(n), start_s=1000, gpus=0, shards=1)) for n in range(12)]
    assert most_in_use(sharers) == 6
    assert {job.gpus for job in sharers} == {1}, "each would have one by itself"


def test_overload_and_jobs_of_several_gpus_are_said_before_all_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{10 * n},3600,{4 if n % 10 == 0 else 1}\n" for n in range(100))
    trace = written(tmp_path, "submit_s,duration_s,num_gpus\n" + rows)
    with pytest.raises(SystemExit):
        main(["assess", "--draws", "1", "--trace", str(trace), "--gpus", "4"])
    said = " ".join(capsys.readouterr().out.split())
    assert "these jobs need 32.5 times the hours that 4 GPUs have" in said
    assert "10 % of the jobs and 31 % of the GPU hours, share with nobody here" in said
