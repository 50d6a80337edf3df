"""Two hungry jobs that share a card of the testbed, measured as the sampler sees them; for tests of what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from telemetry_bed import configure, endless

from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.occupancy import GpuAddress, placed_card
from slurm_gpushare.helper.pair_speeds import ACTIVITY, ENOUGH
from slurm_gpushare.slurm.values import type_index
from slurm_gpushare.store.stored_jobs import EVER

HUNGRY = endless(95, 80, 1024)


def hungry_site(testbed: Testbed, guest_uid: int = 0, guest_activity_pct: float = 95.0) -> Site:
    """A site that knows how hungry the first two workloads are, and whose the second is."""
    configure(testbed, SampleSeconds="0.1")
    site = Site(testbed, owners={1: guest_uid})
    known = zip(TOKENS, (0, guest_uid), (95.0, guest_activity_pct), strict=False)
    enter_profiles(
        site.store,
        [KnownProfile(t, uid, "V100", 2000, 16384, 1, 600.0, {f"{ACTIVITY}_mean": pct}) for t, uid, pct in known],
    )
    return site


@dataclass(frozen=True)
class Sharers:
    """What the two jobs do, whose the second is, and what happens before it comes."""

    resident: str = HUNGRY
    guest: str = HUNGRY
    guest_user: str | None = None
    guest_options: tuple[str, ...] = ()
    before_guest: Callable[[], None] = lambda: None


def share(site: Site, jobs: Sharers = Sharers(), **settings: object) -> tuple[Daemon, str, str]:
    """Two jobs on one card, the second as a guest: helper, resident, guest."""
    resident = site.submit(0, "--time=30", "--requeue", script=jobs.resident)
    daemon = site.daemon("fcfs", **settings)
    tick(site, daemon)
    site.wait_running([resident])
    card = placed_card(site.jobs()[resident])
    assert card is not None
    site.block({GpuAddress(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)} - {card})
    if site.config.records_to == "spool":  # into the database go only those that cannot wait: the profile tells it
        assert wait_until(lambda: alone_is_known(site, daemon, resident), 120), "no interim record of the resident"
    jobs.before_guest()
    guest = submit_for(site, card.index, jobs)
    tick(site, daemon)
    site.wait_running([guest])
    return daemon, resident, guest


def submit_for(site: Site, index: int, jobs: Sharers) -> str:
    """A job that can be sent to GPU `index`: before 23.02 the hook gives jobs an index each, in turns."""
    while True:
        job = site.submit(1, "--time=30", "--requeue", *jobs.guest_options, script=jobs.guest, user=jobs.guest_user)
        job = next(key for key in site.jobs() if key.partition("_")[0] == job)
        shard = site.jobs()[job].shard
        if shard is None or type_index(shard.type) == index:
            return job
        site.testbed.run(["scancel", job])


def alone_is_known(site: Site, daemon: Daemon, job: str) -> bool:
    tick(site, daemon)
    record = site.store.live.of_jobs({int(job)}).get(int(job))
    return record is not None and ACTIVITY in record.alone.stats and record.alone.stats[ACTIVITY].n >= ENOUGH


def tick(site: Site, daemon: Daemon) -> None:
    with site.environment():
        daemon.once()


def kinds(site: Site, job: str) -> set[str]:
    return {decision.kind for decision in site.store.decisions.of_jobs({int(job): EVER})}


def after_ticks(site: Site, daemon: Daemon, condition: Callable[[], bool], timeout_s: float = 180) -> bool:
    def once() -> bool:
        tick(site, daemon)
        return condition()

    return wait_until(once, timeout_s)
