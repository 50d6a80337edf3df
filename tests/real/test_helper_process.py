"""The backfill helper on a real Slurm: the process, its absence, and what others learn from it."""

from __future__ import annotations

import pwd
import signal
import subprocess
import sys

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import SLEEP, TOKENS, Site

from slurm_gpushare.store.stored_jobs import EVER


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def test_one_helper_at_a_time_and_a_stop_that_the_hook_sees(site: Site) -> None:
    log = site.testbed.dir / "log" / "backfill.log"
    earlier = log.stat().st_size if log.exists() else 0  # other tests' helpers wrote that

    def said(words: str) -> bool:
        return words in log.read_bytes()[earlier:].decode()

    with site.process() as helper:
        second = subprocess.run(
            [sys.executable, "-m", "slurm_gpushare", "backfill", "--once"],
            env=site.testbed.env,
            capture_output=True,
            text=True,
        )
        assert second.returncode == 1
        assert str(helper.pid) in second.stderr
        helper.send_signal(signal.SIGHUP)
        # Before the settings change: it might read them once for both reasons.
        assert wait_until(lambda: said("event=reload policy=gpushare"), 60)
        job = site.submit(0)
        site.wait_running([job])
        site.configure(Policy="off")
        assert wait_until(lambda: said("event=reload policy=off"), 60), "no signal is needed"
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(60) == 0
    assert not site.alive(), "a helper that stops says so"
    assert said("event=stop")


def test_a_job_submitted_while_the_helper_is_away_keeps_its_token_and_its_request(site: Site) -> None:
    from slurm_gpushare.store.hookfile import HookFile

    HookFile(site.config.hook_file).beat(0)
    job = site.submit(0)
    before = site.jobs()[job]
    site.tick()
    after = site.jobs()[job]
    for seen in (before, after):
        assert seen.tag is not None
        assert (seen.tag.token, seen.tag.original, seen.tag.lease) == (TOKENS[0], None, False)
    assert after.per_node == before.per_node


def test_a_token_belongs_to_whoever_submitted_with_it_first(site: Site) -> None:
    new = "gs-" + "z" * 19 + "7"
    options = ("--gres=gpu:1", "--mem=100", "--output=/dev/null", "--hold", f"--comment=gpushare:{new}")
    for user in ("games", "man"):
        submit(site.testbed, SLEEP, *options, user=user)
    site.tick()
    assert site.store.workloads.owners_by_token([new]) == {new: pwd.getpwnam("games").pw_uid}
    assert site.store.counters.all()["ticks"] == 1


def test_a_job_explains_itself_to_whoever_asks(site: Site) -> None:
    jobs = [site.submit(number) for number in range(5)]
    site.tick("fcfs")
    site.wait_running(jobs)
    site.tick("fcfs")  # of a new helper: one that took long to publish does not publish again for a while
    guest = next(
        job for job in jobs if {d.kind for d in site.store.decisions.of_jobs({int(job): EVER})} & {"beside", "together"}
    )
    command = [sys.executable, "-m", "slurm_gpushare", "job", guest]
    told = site.testbed.run(command).stdout
    assert f"Job {guest}: RUNNING" in told
    assert "still with job" in told
    assert "expected, not measured" in told
    as_another = site.testbed.run(command, user="games").stdout
    assert "Shares       card gpu0:" in as_another, "what squeue shows anyway, and numbers"
    assert "details of a job are for its owner" in as_another
    missing = site.testbed.run([*command[:-1], "999999"], check=False)
    assert missing.returncode == 2
    assert "no job 999999" in missing.stderr
