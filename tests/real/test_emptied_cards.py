"""The helper is first at a card that becomes empty: the epilog's hold, on a real Slurm."""

from __future__ import annotations

import sys
import time

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed, duration_s=3.0)


def holds(site: Site, node: str = "*") -> list[tuple[int, bool]]:
    """What the nodes wrote down: how many milliseconds each hold took, and whether the helper answered."""
    found = []
    for path in site.config.state_dir.glob(f"nodes/{node}/holds"):
        for line in path.read_text().splitlines():
            begin, end, _, answered, _ = map(int, line.split())
            found.append((end - begin, answered == 1))
    return found


def wanted(site: Site) -> bool:
    """Whether the nodes are told that somebody waits for a card."""
    board = site.config.spool_dir / "hold" / "helper"
    words = board.read_text().split() if board.exists() else []
    return len(words) > 1 and int(words[1]) > 1000 * time.time()


def leased(site: Site, keys: list[str]) -> list[str]:
    """Those of the waiting jobs that the helper has not looked at yet."""
    jobs = site.jobs()
    return [key for key in keys if (tag := jobs[key].tag) is None or tag.lease]


def fill(site: Site, number: int = 4) -> list[str]:
    """A job without a token on every card, until it is cancelled."""
    strangers = [site.plain("--gres=gpu:1") for _ in range(number)]
    site.wait_running(strangers)
    return strangers


@pytest.mark.alone
def test_the_helper_gets_the_cards_that_become_empty(site: Site) -> None:
    """A site's real settings: a look every five seconds, jobs that are shorter than that."""
    site.configure(TickSeconds="5", LeaseSeconds="30", EpilogHold="2")
    with site.process():
        jobs = [site.submit(number % len(TOKENS), "--time=1", script="exec sleep 3") for number in range(36)]
        assert wait_until(lambda: not site.jobs(), 200), site.picture()
        metrics = site.testbed.run([sys.executable, "-m", "slurm_gpushare", "metrics"]).stdout
    ended = site.ended(jobs)
    by_helper = [job for job in ended.values() if job.tag and job.tag.placed]
    counted = site.store.counters.all()
    figures = f"{len(by_helper)} of {len(ended)} by the helper; {counted}; holds {holds(site)}"
    print(figures)
    assert len(by_helper) >= 0.95 * len(ended), figures
    assert counted["cards_won"] >= 0.95 * (counted["cards_won"] + counted.get("cards_lost", 0)), figures
    assert any(answered and took_ms < 2000 for took_ms, answered in holds(site)), "answered holds end early"
    assert "gpushare_hold_seconds_total" in metrics
    assert 'gpushare_cards_total{outcome="won"}' in metrics
    rows = site.testbed.run(["sacct", "-X", "-D", "-n", "-P", "-o", "State", "-j", ",".join(jobs)]).stdout.split()
    assert "RESIZING" not in rows


def test_a_dead_helper_costs_a_node_one_hold(site: Site) -> None:
    site.configure(EpilogHold="1")
    strangers = fill(site)
    with site.process() as helper:
        waiting = [site.submit(number) for number in range(4)]
        # A lease that a dead helper does not end would keep its job waiting for minutes.
        assert wait_until(lambda: not leased(site, waiting) and wanted(site), 60), site.picture()
        helper.kill()
        helper.wait()
    site.testbed.run(["scancel", *strangers])
    assert wait_until(lambda: all(job.running for job in site.jobs().values()), 60), site.picture()
    assert len(site.jobs()) == len(waiting), "Slurm starts them by itself"
    assert holds(site), "the nodes cannot know yet that it is dead"
    for node in ("gpu0", "gpu1"):
        # Both cards of a node may have become empty at once: their holds are then one.
        assert len(holds(site, node)) <= 2
        assert not any(answered for _, answered in holds(site, node))
    before = len(holds(site))
    site.testbed.run(["scancel", *waiting])
    assert wait_until(lambda: not site.jobs(), 60)
    assert len(holds(site)) == before, "nobody holds for it again"


@pytest.mark.parametrize("reason", ["drained", "policy off", "stopped"])
def test_nothing_is_held_in_vain(site: Site, reason: str) -> None:
    site.configure(EpilogHold="1", Policy="off" if reason == "policy off" else "gpushare")
    strangers = fill(site)
    with site.process() as helper:
        site.submit(0)
        if reason != "policy off":
            assert wait_until(lambda: wanted(site), 60)
        if reason == "drained":
            site.testbed.run(["scontrol", "update", "NodeName=gpu[0-1]", "State=DRAIN", "Reason=test"])
            board = site.config.spool_dir / "hold" / "helper"
            assert wait_until(lambda: "gpu0,gpu1" in board.read_text(), 60)
        if reason == "stopped":
            helper.terminate()
            helper.wait(60)
            assert not wanted(site)
        site.testbed.run(["scancel", *strangers])
        assert wait_until(lambda: not set(strangers) & site.jobs().keys(), 60)
    assert holds(site) == []
