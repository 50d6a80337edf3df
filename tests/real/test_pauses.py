"""A pause on a real Slurm: what its owner sees of it, whose cores are whose, and whose time is given back."""

from __future__ import annotations

import json
import sys
import time

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.configuration import CPUS_PER_NODE
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from pair_kit import after_ticks, hungry_site, kinds, share, tick

from slurm_gpushare.helper import promises
from slurm_gpushare.helper.pauses import CPUS_TAKEN
from slurm_gpushare.slurm.commands import connect

STRICT = {"resident_budget_pct": 1.0, "pause_most_pct": 100.0}
"""Any slow-down breaks this promise."""


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return hungry_site(testbed)


def cores(site: Site, *jobs: str) -> list[frozenset[tuple[str, int]]]:
    with site.environment():
        found = connect().cores_of(jobs)
    return [found.get(job, frozenset()) for job in jobs]


def seen_by_owner(site: Site, job: str) -> tuple[str, str]:
    """The state that squeue shows, and what ``gpushare job`` says."""
    state = site.testbed.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip()
    return state, site.testbed.run([sys.executable, "-m", "slurm_gpushare", "job", job]).stdout


def test_a_job_whose_cores_were_taken_in_a_pause_waits_for_them_but_not_for_long(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "WAIT_FOR_CORES_S", 600.0)
    daemon, resident, guest = share(site, **STRICT)
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].paused), site.picture()
    state, said = seen_by_owner(site, guest)
    assert state == "SUSPENDED"
    assert f"Job {guest}: SUSPENDED, paused" in said
    assert f"paused, so that job {resident} gets the speed it was promised" in " ".join(said.split())
    anybody = site.testbed.run([sys.executable, "-m", "slurm_gpushare", "job", guest], user="games").stdout
    assert f"Job {guest}: SUSPENDED, paused" in anybody, "without access to the store too"
    (own,) = cores(site, guest)
    node = site.jobs()[guest].nodes[0]
    held = sum(node in job.nodes for job in site.jobs().values() if job.running and not job.stands_still)

    greedy = site.plain(f"--nodelist={node}", "--ntasks=1", f"--cpus-per-task={CPUS_PER_NODE - held}")
    site.wait_running([greedy])
    (taken,) = cores(site, greedy)
    assert own & taken, "Slurm gives a suspended job's cores away"
    tick(site, daemon)
    assert site.jobs()[guest].paused
    site.testbed.run(["scancel", resident])

    def waits() -> bool:
        assert not site.jobs()[guest].running or site.jobs()[guest].stands_still, "it goes on beside the CPU job"
        return "resume-waits" in kinds(site, guest)

    assert after_ticks(site, daemon, waits), site.picture()
    assert CPUS_TAKEN in " ".join(seen_by_owner(site, guest)[1].split())
    monkeypatch.setattr(promises, "WAIT_FOR_CORES_S", 1.0)
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].state == "RUNNING"), site.picture()
    assert site.jobs()[greedy].state == "RUNNING", "who took its cores keeps running beside it"
    tick(site, daemon)
    tag = site.jobs()[guest].tag
    assert tag is not None
    assert tag.paused is None
    (span,) = site.store.sharing.of_job(int(guest))
    assert span.paused_s > 0, "both owners' figures leave the pause out"
    assert "resumed" in kinds(site, guest)


def test_beside_a_cpu_job_a_guest_is_stopped_by_a_signal_and_given_its_time_back(site: Site) -> None:
    daemon, resident, guest = share(site, **STRICT)
    before = show(site.testbed, guest)["TimeLimit"]
    busy = site.plain(f"--nodelist={site.jobs()[guest].nodes[0]}")
    site.wait_running([busy])
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].paused), site.picture()
    state, said = seen_by_owner(site, guest)
    assert state == "STOPPED"
    assert f"Job {guest}: STOPPED, paused" in said
    own, others = cores(site, guest, busy)
    assert own, "it keeps its cores"
    assert not own & others
    assert after_ticks(site, daemon, lambda: "extended" in kinds(site, guest)), site.picture()
    assert show(site.testbed, guest)["TimeLimit"] > before
    tag = site.jobs()[guest].tag
    assert tag is not None
    assert tag.paused is not None
    since_s = tag.paused.since_s
    assert wait_until(lambda: time.time() >= since_s + 2, 10), "a pause counts in whole seconds"
    site.testbed.run(["scancel", resident])
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].state == "RUNNING"), site.picture()
    tick(site, daemon)
    tag = site.jobs()[guest].tag
    assert tag is not None
    assert tag.paused is None
    assert tag.stopped_before_s > 0
    (told,) = json.loads(site.testbed.run([sys.executable, "-m", "slurm_gpushare", "job", guest, "--json"]).stdout)
    assert told["paused_s"] >= tag.stopped_before_s
    assert told["given_back_s"] >= 60
