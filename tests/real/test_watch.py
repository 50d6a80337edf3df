"""Pairs that run, on a real Slurm: what the sampler sees of them is compared with the promise, and acted on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helper_kit import TOKENS, Site, original
from telemetry_bed import configure, endless

from slurm_gpushare.coschedule.daemon import Daemon
from slurm_gpushare.coschedule.occupancy import Card, placed_card
from slurm_gpushare.coschedule.watch import ACTIVITY, MIN_SAMPLES
from slurm_gpushare.slurm.gres import type_index
from slurm_gpushare.store.known import KnownProfile, enter_profiles
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.jobs import show
from slurm_gpushare.testbed.processes import wait_until

HUNGRY = endless(95, 80, 1024)


@pytest.fixture
def site(testbed: Testbed) -> Site:
    configure(testbed, SampleSeconds="0.1")
    site = Site(testbed)
    features = {f"{ACTIVITY}_mean": 95.0}
    enter_profiles(site.store, [KnownProfile(t, 0, "V100", 2000, 16384, 1, 600.0, features) for t in TOKENS[:2]])
    return site


def share(site: Site, **settings: object) -> tuple[Daemon, str, str]:
    """Two hungry jobs on one card, the second as a guest: helper, resident, guest."""
    resident = site.submit(0, "--time=30", "--requeue", script=HUNGRY)
    daemon = site.daemon("fcfs", **settings)
    tick(site, daemon)
    site.wait_running([resident])
    card = placed_card(site.jobs()[resident])
    assert card is not None
    site.block({Card(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)} - {card})
    assert wait_until(lambda: alone_is_known(site, daemon, resident), 120), "no interim record of the resident"
    guest = submit_for(site, card.index)
    tick(site, daemon)
    site.wait_running([guest])
    return daemon, resident, guest


def submit_for(site: Site, index: int) -> str:
    """A job that can be sent to GPU `index`: before 23.02 the hook gives jobs an index each, in turns."""
    while True:
        job = site.submit(1, "--time=30", "--requeue", script=HUNGRY)
        shard = site.jobs()[job].shard
        if shard is None or type_index(shard.type) == index:
            return job
        site.testbed.run(["scancel", job])


def alone_is_known(site: Site, daemon: Daemon, job: str) -> bool:
    tick(site, daemon)
    record = site.store.live.of_jobs({int(job)}).get(int(job))
    return record is not None and ACTIVITY in record.alone.stats and record.alone.stats[ACTIVITY].n >= MIN_SAMPLES


def tick(site: Site, daemon: Daemon) -> None:
    with site.environment():
        daemon.once()


def kinds(site: Site, job: str) -> set[str]:
    return {decision.kind for decision in site.store.decisions.of_job(int(job))}


def after_ticks(site: Site, daemon: Daemon, condition: Callable[[], bool]) -> bool:
    def once() -> bool:
        tick(site, daemon)
        return condition()

    return wait_until(once, 180)


def test_a_guest_slowed_past_its_promise_is_requeued_and_never_comes_back(site: Site) -> None:
    daemon, resident, guest = share(site, on_slowdown="requeue", guest_cap_pct=5.0)
    assert after_ticks(site, daemon, lambda: "requeued" in kinds(site, guest)), site.picture()
    assert "slowed" in kinds(site, resident)
    assert wait_until(lambda: site.jobs()[guest].pending, 60), site.picture()
    assert site.store.sharing.forbidden() == {(TOKENS[0], TOKENS[1])}
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
    assert int(site.jobs()[guest].tag.extra["x"]) >= 1  # type: ignore[union-attr]
