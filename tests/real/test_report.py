"""What people see of jobs that share: status, jobs, report, metrics, on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site


def gpushare(testbed: Testbed, *arguments: str, user: str | None = None, code: int = 0) -> str:
    command = [sys.executable, "-m", "slurm_gpushare", *arguments]
    done: subprocess.CompletedProcess[str] = testbed.run(command, user=user, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def sharing(testbed: Testbed) -> tuple[Site, list[str]]:
    """Five jobs on four cards, so that two of them share one."""
    site = Site(testbed)
    jobs = [site.submit(number) for number in range(5)]
    daemon = site.daemon("fcfs")
    with site.environment():
        daemon.once()
    site.wait_running(jobs)
    with site.environment():
        daemon.once()
    return site, jobs


def test_two_jobs_on_one_card_are_seen_everywhere(sharing: tuple[Site, list[str]], tmp_path: Path) -> None:
    site, jobs = sharing
    testbed = site.testbed
    gpus = json.loads(gpushare(testbed, "status", "--json"))
    (shared,) = [gpu for gpu in gpus if gpu["state"] == "shared"]
    pair = {occupant["job_id"] for occupant in shared["occupants"]}
    assert len(gpus) == 4
    assert pair < set(jobs)
    assert "4 GPUs: 1 shared, 3 busy" in gpushare(testbed, "status")

    listed = {job["job_id"]: job for job in json.loads(gpushare(testbed, "jobs", "--json"))}
    assert set(listed) == set(jobs)
    assert {listed[key]["partners"][0] for key in pair} == pair
    assert all(listed[key]["cost"]["predicted_isd_pct"] is not None for key in pair)

    assert "gpushare_pairs 1" in gpushare(testbed, "metrics").splitlines()

    def reported() -> bool:  # accounting hears of a job a moment after it started
        found = json.loads(gpushare(testbed, "report", "--json", "-S", "now-1hour"))
        return {job["job_id"] for job in found["jobs"] if job["role"] in {"guest", "resident"}} == pair

    assert wait_until(reported, 60)
    page = testbed.layout.home / "report.html"
    gpushare(testbed, "report", "-S", "now-1hour", "--html", str(page))
    assert all(f"job {key}, " in page.read_text() for key in pair)


def test_users_see_who_is_where_and_what_it_costs(sharing: tuple[Site, list[str]]) -> None:
    site, jobs = sharing
    seen = json.loads(gpushare(site.testbed, "status", "--json", user="games"))
    assert {occupant["job_id"] for gpu in seen for occupant in gpu["occupants"]} == set(jobs)
    assert all(gpu["gpu_util_pct"] is None for gpu in seen), "telemetry is for those who may read the store"
    (shared,) = [gpu for gpu in seen if gpu["state"] == "shared"]
    assert all(occupant["cost"]["predicted_isd_pct"] is not None for occupant in shared["occupants"])


def test_without_slurmdbd_a_report_says_so_in_one_line(testbed: Testbed) -> None:
    testbed.stop("slurmdbd")
    said = gpushare(testbed, "report", code=1)
    assert "gpushare: error: sacct" in said.splitlines()[-1]
