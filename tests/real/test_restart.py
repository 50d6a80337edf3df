"""slurmctld restarts while jobs share: what each release makes of it, and what is said and done about it."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.reset import idle_nodes
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site

from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.helper.tick import TickReport
from slurm_gpushare.protocol.release import parse_release


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def keeps_shards(site: Site) -> bool:
    return parse_release(site.testbed.release).can("keeps_whole_gpus_apart")


def five_on_four_cards(site: Site) -> tuple[Daemon, list[str]]:
    """Two of them share."""
    jobs = [site.submit(number) for number in range(5)]
    daemon = site.daemon("fcfs")
    tick(site, daemon)
    site.wait_running(jobs)
    assert tick(site, daemon).pairs == 1, site.picture()
    return daemon, jobs


def tick(site: Site, daemon: Daemon) -> TickReport:
    with site.environment():
        return daemon.once()


def node_states(site: Site) -> set[str]:
    """As Slurm has them; with a star while a node has not answered a new slurmctld."""
    return set(site.testbed.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split())


def lost_shards(site: Site) -> bool:
    """Whether doctor says so."""
    done = site.testbed.run([sys.executable, "-m", "slurm_gpushare", "doctor", "--json"], check=False)
    return any(finding["check"] == "lost-shards" for finding in json.loads(done.stdout))


def test_sharers_keep_their_shards(site: Site) -> None:
    if not keeps_shards(site):
        pytest.skip("22.05 loses them: the other test")
    daemon, jobs = five_on_four_cards(site)
    before = {key: (job.nodes, job.per_node) for key, job in site.jobs().items()}
    site.testbed.restart("slurmctld")
    guest = site.submit(5)  # it is sent to a node of which Slurm has not heard yet
    assert wait_until(lambda: tick(site, daemon).pairs == 2, 60), site.picture()
    assert {key: (job.nodes, job.per_node) for key, job in site.jobs().items() if key in before} == before
    assert len(site.store.sharing.open()) == 2, "the same two share as before"
    assert not lost_shards(site)
    site.testbed.run(["scancel", *jobs, guest])
    idle_nodes(site.testbed)
    used = site.testbed.run(["sinfo", "-h", "-N", "-O", "gresused:0"]).stdout
    assert "shard:v100_0:0" in used
    assert "shard:v100_0:1" not in used, "no shard is left in use"


def test_22_05_loses_shards_which_is_said_and_can_be_mended(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    if keeps_shards(site):
        pytest.skip("this Slurm keeps them: the other test")
    caplog.set_level(logging.INFO)
    daemon, jobs = five_on_four_cards(site)
    site.testbed.restart("slurmctld")

    def said_so() -> bool:  # the shards go when a node registers anew, some seconds after the restart
        tick(site, daemon)
        return any(message.startswith("event=lost-shards node=gpu0 ") for message in caplog.messages)

    assert wait_until(said_so, 60), caplog.messages
    assert lost_shards(site)
    assert set(jobs) <= {key for key, job in site.jobs().items() if job.running}, "they run on"

    # What doctor says: drain, wait until they are empty, restart slurmctld, resume.
    site.testbed.run(["scontrol", "update", "nodename=gpu[0-1]", "state=drain", "reason=shards"])
    site.testbed.run(["scancel", *jobs])
    assert wait_until(lambda: not any(job.running for job in site.jobs().values()), 60), site.picture()
    site.testbed.restart("slurmctld")
    site.testbed.run(["scontrol", "update", "nodename=gpu[0-1]", "state=resume"], check=False)  # idle already, or not
    assert wait_until(lambda: node_states(site) == {"idle"}, 60), site.picture()
    assert wait_until(lambda: not lost_shards(site), 60), site.picture()
    tick(site, daemon)
    assert "event=shards-back node=gpu0" in caplog.messages
    sharers = [site.submit(number) for number in range(5, 10)]
    tick(site, daemon)
    site.wait_running(sharers)
