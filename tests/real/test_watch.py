"""Pairs that run, on a real Slurm: what the sampler sees of them is compared with the promise, and acted on."""

from __future__ import annotations

import time

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site, original
from pair_kit import after_ticks, hungry_site, kinds, share, tick


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return hungry_site(testbed)


def test_a_guest_slowed_past_its_promise_is_requeued_and_never_comes_back(site: Site) -> None:
    daemon, resident, guest = share(site, on_slowdown="requeue", guest_cap_pct=5.0)
    assert after_ticks(site, daemon, lambda: "requeued" in kinds(site, guest)), site.picture()
    assert "slowed" in kinds(site, resident)
    assert wait_until(lambda: site.jobs()[guest].pending, 60), site.picture()
    assert site.store.sharing.banned(time.time()) == {(TOKENS[0], TOKENS[1])}
    # Slurm makes it wait two minutes, in which the helper takes it back from the card; a test need not wait longer.
    assert after_ticks(site, daemon, lambda: original(site.jobs()[guest])), site.picture()
    site.testbed.run(["scontrol", "update", f"JobId={guest}", "StartTime=now"])
    for _ in range(3):
        tick(site, daemon)
    assert site.jobs()[resident].running
    assert site.jobs()[guest].pending


def test_a_slowed_job_is_given_its_time_back(site: Site) -> None:
    daemon, resident, guest = share(site, extend_time_limit=True)
    assert after_ticks(site, daemon, lambda: {"extended"} <= kinds(site, guest) & kinds(site, resident)), site.picture()
    assert show(site.testbed, int(resident))["TimeLimit"] > "00:30:00"
    assert show(site.testbed, int(guest))["TimeLimit"] > "00:30:00"
    tick(site, daemon)
    assert site.jobs()[guest].tag.given_min >= 1  # type: ignore[union-attr]
