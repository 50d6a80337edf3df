"""Limits on GPUs on a real Slurm: no job is placed past them, counted as the cards that are held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from pair_kit import kinds


@pytest.fixture
def limited(testbed: Testbed) -> Iterator[Site]:
    """A QOS whose jobs have two GPUs at the most, and three of the four shards that `configure` gives to these."""
    testbed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "GrpTRES=gres/gpu=2,gres/shard=3"])
    testbed.configure(slurm={"AccountingStorageEnforce": "associations,limits,qos"})
    assert wait_until(lambda: set(testbed.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split()) == {"idle"}, 60)
    yield Site(testbed)
    testbed.run(["scancel", "--user=root"])
    testbed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "GrpTRES=gres/gpu=-1,gres/shard=-1"])


def test_halves_do_not_multiply_a_limit_and_nobody_is_sent_where_slurm_would_not_start_him(limited: Site) -> None:
    site = limited
    daemon = site.daemon("fcfs")
    jobs = [site.submit(number, "--time=30") for number in range(6)]
    with site.environment():
        for _ in range(3):
            daemon.once()
    placed = [job for job in site.jobs().values() if job.tag and job.tag.placed]
    assert len(placed) == 3, "three shards"
    assert len({job.tag.placed for job in placed if job.tag}) == 2, "two cards"
    assert wait_until(lambda: all(site.jobs()[job.key].running for job in placed), 60), site.picture()
    assert not any("taken-back" in kinds(site, job) for job in jobs)
