"""Preemption on a real Slurm: a job that may preempt those who share a card has it about as soon as a whole one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from pair_kit import Sharers, after_ticks, hungry_site, kinds, share

from slurm_gpushare.helper.occupancy import placed_card

BY_QOS = {"PreemptType": "preempt/qos"}
BY_PARTITION = {"PreemptType": "preempt/partition_prio"}


@pytest.fixture
def high(testbed: Testbed) -> Iterator[None]:
    """A QOS whose jobs may preempt those of `normal`."""
    testbed.run(["sacctmgr", "-i", "add", "qos", "high", "preempt=normal", "priority=1000"])
    testbed.run(["sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,high"])
    yield
    testbed.run(["scancel", "--user=root"])
    assert wait_until(lambda: not testbed.run(["squeue", "-h", "-a"]).stdout, 60)
    testbed.run(["sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal"])
    testbed.run(["sacctmgr", "-i", "delete", "qos", "high"])


def preempting(testbed: Testbed, **keys: str) -> Site:
    """A site that preempts; partition `urgent` comes before `gpu`."""
    conf = testbed.layout.slurm_conf
    line = next(line for line in conf.read_text().splitlines() if line.startswith("PartitionName=gpu "))
    urgent = line.replace("=gpu ", "=urgent PriorityTier=10 ", 1).replace("Default=YES", "Default=NO")
    conf.write_text(f"{conf.read_text()}{urgent}\n")
    testbed.configure(slurm=keys, gpushare={"LeaseSeconds": "30", "Partitions": "gpu,urgent"})
    assert wait_until(lambda: set(testbed.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split()) == {"idle"}, 60)
    return Site(testbed)


def fill(site: Site) -> list[str]:
    """Two sharers on every card, and some that wait."""
    jobs = [site.submit(number, "--time=11") for number in range(12)]
    assert wait_until(lambda: sum(job.running for job in site.jobs().values()) == 8, 60), site.picture()
    return jobs


@pytest.mark.parametrize(
    ("keys", "options", "gpus"),
    [
        (BY_QOS | {"PreemptMode": "REQUEUE"}, "--qos=high", 1),
        (BY_PARTITION | {"PreemptMode": "CANCEL"}, "--partition=urgent", 2),
    ],
)
def test_a_card_that_two_share_is_freed_for_who_may_preempt_them(
    testbed: Testbed, high: None, keys: dict[str, str], options: str, gpus: int
) -> None:
    site = preempting(testbed, **keys)
    with site.process("--policy", "fcfs"):
        jobs = fill(site)
        first = site.plain(f"--gres=gpu:{gpus}", "--time=1", options)
        begun_s = time.monotonic()
        assert wait_until(lambda: site.jobs()[first].running, 60), site.picture()
        print(f"{gpus} GPUs after {time.monotonic() - begun_s:.1f} s")
        still = [job for job in jobs if job in site.jobs()]
        again = [job for job in still if site.jobs()[job].restarts]
        gone = len(jobs) - len(still) + len(again)
        assert 2 * gpus <= gone <= 2 * gpus + 2, "24.11 takes another one while ours end"
        assert not again if keys["PreemptMode"] == "CANCEL" else len(again) == gone
        assert wait_until(lambda: site.jobs()[first].state == "RUNNING", 30)
    ours = [job for job in jobs if "preempted" in kinds(site, job)]
    assert not ours or len(ours) == 2 * gpus, "recorded; 26.05 frees cards by itself"


@pytest.mark.full
def test_who_stands_still_is_preempted_like_who_runs(testbed: Testbed, high: None) -> None:
    preempting(testbed, **BY_QOS, PreemptMode="REQUEUE")
    site = hungry_site(testbed)
    daemon, _, guest = share(site, Sharers(), resident_budget_pct=1.0, pause_most_pct=100.0)
    assert after_ticks(site, daemon, lambda: "paused" in kinds(site, guest)), site.picture()
    card = placed_card(site.jobs()[guest])
    assert card is not None
    begun_s = time.monotonic()
    first = site.plain(f"--gres=gpu:v100_{card.index}:1", f"--nodelist={card.node}", "--qos=high", "--time=1")
    assert after_ticks(site, daemon, lambda: site.jobs()[first].running), site.picture()
    print(f"after {time.monotonic() - begun_s:.1f} s")
    assert site.jobs()[guest].restarts


def test_nobody_is_lost_for_a_job_that_would_not_start(testbed: Testbed, high: None) -> None:
    site = preempting(testbed, **BY_QOS, PreemptMode="CANCEL", PreemptExemptTime="10:00")
    with site.process("--policy", "fcfs"):
        jobs = fill(site)
        site.plain("--gres=gpu:1", "--qos=high")
        site.plain("--gres=gpu:1", "--qos=high", "--hold")
        site.plain("--gres=gpu:1", "--qos=high", "--begin=now+1hour")
        ticks = site.store.counters.all()["ticks"]
        assert wait_until(lambda: site.store.counters.all()["ticks"] > ticks + 5, 90)
        assert sum(site.jobs()[job].running for job in jobs) == 8, "exempt for ten minutes"
