"""A change that reaches a job which has just started must do nothing."""

from __future__ import annotations

import time

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import SLEEP, Site

from slurm_gpushare.helper.changes import Outcome, apply, place, restore
from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.queue import Job


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def _rows(site: Site, job: str) -> list[str]:
    """The states of all accounting rows of a job."""
    asked = ["sacct", "-X", "-D", "-n", "-P", "-o", "State", "-j", job]
    return site.testbed.run(asked).stdout.split()


def _late_placement(site: Site, waiting: Job, node: str) -> Outcome:
    card = GpuAddress(node, site.index(waiting.key))
    with site.environment():
        slurm = connect()
        change = place(waiting, card, f"v100_{card.index}", 1, slurm.release, time.time())
        assert change is not None
        return apply(slurm, change).outcome


def test_a_placement_that_comes_after_the_start_does_nothing(site: Site) -> None:
    job = site.submit(0)
    waiting = site.jobs()[job]
    site.testbed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    site.wait_running([job])
    started = site.jobs()[job]
    assert _late_placement(site, waiting, started.nodes[0]) is Outcome.MOVED_ON
    assert _late_placement(site, waiting, "gpu1" if started.nodes == ("gpu0",) else "gpu0") is Outcome.MOVED_ON
    after = site.jobs()[job]
    assert (after.state, after.admin_comment, after.per_node) == ("RUNNING", started.admin_comment, started.per_node)
    site.testbed.run(["scancel", job])
    assert wait_until(lambda: any(state.startswith("CANCELLED") for state in _rows(site, job)), 60)
    assert "RESIZING" not in _rows(site, job)


def test_a_release_that_comes_after_the_start_leaves_the_tag_alone(site: Site) -> None:
    job = site.submit(0)
    site.tick()
    site.wait_running([job])
    started = site.jobs()[job]
    assert started.tag is not None
    assert started.tag.placed is not None
    with site.environment():
        slurm = connect()
        stale = Job(**{name: getattr(started, name) for name in Job.__slots__} | {"state": "PENDING"})
        change = restore(stale, slurm.release, time.time())
        assert change is not None
        assert apply(slurm, change).outcome is Outcome.MOVED_ON
    assert site.jobs()[job].admin_comment == started.admin_comment


def test_a_job_of_a_user_whom_accounting_does_not_know_is_placed_too(site: Site) -> None:
    options = ("--gres=gpu:1", "--mem=100", "--output=/dev/null", "--begin=now+1hour", "--account=nobodys")
    job = str(submit(site.testbed, SLEEP, *options, user="daemon"))
    tag = "GS1:c=1;t=gs-aaaaaaaaaaaaaaaaaaaa;o=gpu:1;l=1"
    site.testbed.run(["scontrol", "update", f"JobId={job}", f"AdminComment={tag}"])
    with site.environment():
        slurm = connect()
        (waiting,) = slurm.jobs([job])
        assert parse_tag(waiting.admin_comment) is not None
        original = restore(waiting, slurm.release, time.time())
        assert original is not None
        # 26.05 may have no time for such a job at first: the helper tries at every look.
        assert wait_until(lambda: apply(slurm, original).outcome is Outcome.DONE, 60)
