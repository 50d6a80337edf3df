"""Whoever can open a card from outside any job: what it takes is charged to nobody, and hides nobody."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from hook_testbed import home_of
from pair_kit import Sharers, after_ticks, hungry_site, kinds, share, tick
from telemetry_bed import endless, output, spooled, start, start_measured, until, workload

from slurm_gpushare.helper.occupancy import placed_card
from slurm_gpushare.helper.pair_speeds import ACTIVITY
from slurm_gpushare.protocol.history import OUTSIDERS
from slurm_gpushare.protocol.record import ENOUGH, OUTSIDE, RecordKind

Verdict = Callable[[str, str, str], None]
STRICT = {"resident_budget_pct": 1.0, "pause_most_pct": 100.0}
"""Any slow-down breaks this promise."""


@contextmanager
def outsider(testbed: Testbed, node: str, gpu: int, util: float) -> Iterator[None]:
    """A process of a user's with a login on the node, and no job there."""
    argv, env = testbed.command(workload(util, util / 2, 64, work_s=600, epochs=100).split(), user="nobody")
    place = {"GPUSHARE_EMU_DIR": str(testbed.layout.emu), "SLURMD_NODENAME": node, "CUDA_VISIBLE_DEVICES": str(gpu)}
    home = home_of(testbed, "nobody")
    with subprocess.Popen(argv, env={**(env or {}), **place}, cwd=home, start_new_session=True) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.usefixtures("raw_shards")
def test_one_per_cent_from_outside_keeps_no_workload_from_being_measured(testbed: Testbed, verdict: Verdict) -> None:
    with outsider(testbed, "gpu0", 0, 1.0):
        job = start_measured(testbed, endless(40, 10, 1024))
        records = lambda: {record.job_id: record for _, record in spooled(testbed, RecordKind.INTERIM)}  # noqa: E731
        until(lambda: job in (found := records()) and found[job].alone_s + found[job].shared_s > 5)
    record = records()[job]
    testbed.run(["scancel", str(job)])
    verdict("1 % of a card from outside any job, so that nobody is ever alone there", "measured alone",
            "measured alone" if record.alone_s > record.shared_s else f"{record.shared_s:.0f} s shared")  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("raw_shards")
def test_what_a_job_leaves_behind_is_no_other_jobs(testbed: Testbed, verdict: Verdict) -> None:
    left = start(testbed, f"setsid {workload(40, 10, 512, work_s=600, epochs=100)} >/dev/null 2>&1 & echo $!; sleep 3")
    wait_for(testbed, left, ["COMPLETED"])
    job = start_measured(testbed, endless(60, 10, 1024), user="nobody")
    records = lambda: {record.job_id: record for _, record in spooled(testbed, RecordKind.INTERIM)}  # noqa: E731
    until(lambda: job in (found := records()) and found[job].alone_s + found[job].shared_s > 5)
    record = records()[job]
    testbed.run(["scancel", str(job)])
    os.kill(int(output(testbed, left)), signal.SIGKILL)
    seen = f"{'nobody' if record.alone_s > record.shared_s else 'the next job'} is blamed, "
    seen += "it is said" if OUTSIDE in record.alone.stats else "it is not said"
    verdict("a process that outlives its job, and uses the card of the next one", "nobody is blamed, it is said", seen)


def test_one_per_cent_from_outside_hides_no_liar(testbed: Testbed, verdict: Verdict) -> None:
    site = hungry_site(testbed)
    with outsider_beside(site) as jobs:
        daemon, _, guest = share(site, jobs, **STRICT)
        paused = after_ticks(site, daemon, lambda: "paused" in kinds(site, guest))
    verdict("1 % of the card from outside, beside a job that slows its neighbour", "paused all the same",
            "paused all the same" if paused else "left alone")  # fmt: skip


@contextmanager
def outsider_beside(site: Site, util: float = 1.0, **jobs: str) -> Iterator[Sharers]:
    """Comes just before the guest, onto the resident's card."""
    opened: list[object] = []

    def come() -> None:
        (card,) = {card for job in site.jobs().values() if (card := placed_card(job)) is not None}
        context = outsider(site.testbed, card.node, card.index, util)
        context.__enter__()
        opened.append(context)

    try:
        yield Sharers(before_guest=come, **jobs)
    finally:
        for context in opened:
            context.__exit__(None, None, None)  # type: ignore[attr-defined]


def test_what_an_outsider_takes_is_no_neighbours_fault(testbed: Testbed, verdict: Verdict) -> None:
    """The resident is slowed to half by somebody without a job; its guest does next to nothing."""
    site = hungry_site(testbed, guest_activity_pct=4.0)
    with outsider_beside(site, 95.0, guest=endless(4, 1, 512)) as jobs:
        daemon, resident, guest = share(site, jobs)

        def measured() -> bool:
            record = site.store.live.of_jobs({int(resident)}).get(int(resident))
            stat = record.shared.stats.get(ACTIVITY) if record else None
            return stat is not None and stat.n >= 2 * ENOUGH

        assert after_ticks(site, daemon, measured), site.picture()
        for _ in range(3):
            tick(site, daemon)
        record = site.store.live.of_jobs({int(resident)})[int(resident)]
    done = kinds(site, guest) & {"paused", "requeued", "slowed"}
    broken, banned = site.store.violations.broken_promises(), site.store.sharing.banned(0.0)
    said = OUTSIDE in record.shared.stats and site.store.counters.all().get(OUTSIDERS, 0) > 0
    nothing = not done and not broken and not banned
    verdict("half of a card used from outside any job, to have an innocent neighbour blamed",
            "nothing is done to it, it is said", f"{'nothing' if nothing else [done, broken, banned]} is done to it, "
            f"{'it is said' if said else 'it is not said'}")  # fmt: skip
