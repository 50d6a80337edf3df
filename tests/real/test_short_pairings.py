"""Pairings of a few seconds, on a real Slurm: final records teach where no interim record was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare_lab.known_profiles import KnownProfile, enter_profiles
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from telemetry_bed import configure, endless, node_dir, workload

from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.occupancy import GpuAddress, placed_card
from slurm_gpushare.helper.pair_speeds import ACTIVITY, ENOUGH, Tally
from slurm_gpushare.slurm.values import type_index
from slurm_gpushare.store.stored_jobs import EVER

LONG = endless(95, 80, 1024)
SHORT = workload(95, 80, 1024, work_s=4, epochs=1)


@pytest.fixture
def site(testbed: Testbed) -> Site:
    configure(testbed, SampleSeconds="0.1", InterimSeconds="600")
    site = Site(testbed)
    features = {f"{ACTIVITY}_mean": 95.0, "gpu_util_mean_pct": 95.0, "mem_access_mean_pct": 80.0}
    enter_profiles(site.store, [KnownProfile(t, 0, "V100", 2000, 16384, 2, 600.0, features) for t in TOKENS[:2]])
    return site


def tick(site: Site, daemon: Daemon) -> None:
    with site.environment():
        daemon.once()


def guest_for(site: Site, index: int, go: Path) -> str:
    """A job that can be sent to GPU `index`: before 23.02 the hook gives jobs an index each, in turns.

    It works for a few seconds once there is the file `go`.
    """
    while True:
        job = site.submit(1, "--time=30", script=f"until [ -e {go} ]; do sleep 0.1; done; {SHORT}")
        shard = site.jobs()[job].shard
        if shard is None or type_index(shard.type) == index:
            return job
        site.testbed.run(["scancel", job])


def is_measured(site: Site, job: str) -> bool:
    """Whether the job's sampler has opened NVML: being nice, it starts late on a busy machine."""
    try:
        pid = (node_dir(site.testbed, site.jobs()[job].nodes[0]) / "jobs" / job).read_text().split()[0]
        return "libnvidia-ml" in Path(f"/proc/{pid}/maps").read_text()
    except (OSError, IndexError):  # the prolog is still to write its pid
        return False


def test_a_pairing_of_a_few_seconds_teaches_by_the_final_records_of_both(site: Site) -> None:
    resident = site.submit(0, "--time=30", script=LONG)
    daemon = site.daemon("fcfs")
    tick(site, daemon)
    site.wait_running([resident])
    card = placed_card(site.jobs()[resident])
    assert card is not None
    site.block({GpuAddress(node, index) for node in ("gpu0", "gpu1") for index in (0, 1)} - {card})
    go = site.testbed.layout.home / "go"
    guest = guest_for(site, card.index, go)

    def shares() -> bool:
        tick(site, daemon)
        return site.jobs()[guest].running

    assert wait_until(shares, 120), site.picture()
    tick(site, daemon)  # sees the pair
    assert wait_until(lambda: is_measured(site, resident) and is_measured(site, guest), 120)
    go.touch()
    assert wait_until(lambda: guest not in site.jobs(), 120), site.picture()
    # The one interim record that a sampler may have written tells that its job's memory grew, at the job's start.
    written = site.store.live.of_jobs({int(resident), int(guest)}).values()
    samples = [Tally.of(ACTIVITY, record.shared).n for record in written]
    assert all(number < ENOUGH for number in samples), "too little of the pair to learn from"
    site.testbed.run(["scancel", resident])

    def learned() -> bool:
        tick(site, daemon)
        seen = {(item.victim, item.neighbour): item.rate for item in site.store.observations.after(0)}
        return {(TOKENS[0], TOKENS[1]), (TOKENS[1], TOKENS[0])} <= seen.keys() and all(r < 0.95 for r in seen.values())

    assert wait_until(learned, 120), site.store.observations.after(0)
    (span,) = site.store.sharing.of_jobs({int(guest): EVER})
    assert span.resident_rate_seen is not None
    assert span.guest_rate_seen is not None
