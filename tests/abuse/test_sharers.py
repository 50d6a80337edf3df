"""What somebody who shares a card, or has shared one, may try against neighbours, the queue and the helper."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site
from hook_testbed import USER, home_of
from pair_kit import HUNGRY, Sharers, after_ticks, hungry_site, kinds, share, tick
from telemetry_bed import endless, until, workload

from slurm_gpushare.helper.act import MANY
from slurm_gpushare.helper.pair_speeds import ACTIVITY, ENOUGH
from slurm_gpushare.node.processes import stands_still
from slurm_gpushare.store.spool import Spool

Verdict = Callable[[str, str, str], None]
GAMES = pwd.getpwnam(USER).pw_uid
STRICT = {"resident_budget_pct": 1.0, "pause_most_pct": 100.0}
"""Any slow-down breaks this promise."""

# Hides from every look of the node's samplers: how often root's processes have slept is for all to read. "stop" stops
# the work for a look, "leave" has it off the card.
LURKS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gpushare_lab.emulator.card import Demand, EmulatedCard, Sample, now_us
from gpushare_lab.job.workload import visible_card

class Looks:
    def __init__(self):
        self.found_s, self.samplers = 0.0, []
    def count(self):
        if time.monotonic() > self.found_s + 2:
            self.found_s = time.monotonic()
            self.samplers = [p.parent for p in Path("/proc").glob("[0-9]*/cmdline") if self.is_sampler(p)]
        return [self.slept(process) for process in self.samplers]
    def is_sampler(self, path):
        try:
            words = path.read_bytes().split(b"\\0")
        except OSError:
            return False
        return b"slurm_gpushare.node.sampler" in words and os.environ["SLURMD_NODENAME"].encode() in words
    def slept(self, process):
        try:
            return (process / "status").read_text().partition("voluntary_ctxt_switches:")[2].split()[0]
        except (OSError, IndexError):
            return None
    def until_next(self, work=lambda: None):
        before = self.count()
        while self.count() == before:
            work()
            time.sleep(0.001)

looks = Looks()
if sys.argv[1] == "stop":
    work = subprocess.Popen(sys.argv[2:])
    while True:
        looks.until_next()
        work.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        work.send_signal(signal.SIGCONT)
with EmulatedCard(visible_card(os.environ)) as card:
    while True:
        seat, last = card.join(Demand(95.0, 80.0, 512)), [0]
        def work():
            if now_us() > last[0] + 100_000:
                last[0] = now_us()
                seat.publish(Sample(last[0], 50.0, 40.0, 0.0, 0.0, 0.5))
        looks.until_next(work)
        seat.leave(now_us())
        time.sleep(0.1)
"""

# All processes of one of the user's jobs, on this testbed alone: other testbeds may run jobs of the same user.
WAKE = """
while sleep 1; do
  for process in /proc/[0-9]*; do
    tr '\\0' '\\n' <$process/environ 2>/dev/null | grep -qx "SLURM_JOB_ID={job}" || continue
    tr '\\0' '\\n' <$process/environ 2>/dev/null | grep -qx "SLURM_CONF=$SLURM_CONF" || continue
    kill -CONT ${{process#/proc/}}
  done
done
"""


@pytest.fixture
def site(testbed: Testbed) -> Iterator[Site]:
    site = Site(testbed, owners={1: GAMES})
    yield site
    site.store.close()


def as_user(site: Site, script: str, *options: str) -> str:
    """A job of the attacker's without a token."""
    home = home_of(site.testbed)
    return str(submit(site.testbed, script, "--mem=100", "--output=/dev/null", *options, user=USER, cwd=home))


@pytest.mark.parametrize("how", ["kill", pytest.param("scancel", marks=pytest.mark.full)])
def test_who_wakes_its_paused_job_up_is_noticed(testbed: Testbed, verdict: Verdict, how: str) -> None:
    site = hungry_site(testbed, GAMES)
    daemon, _, guest = share(site, Sharers(guest_user=USER), **STRICT)
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].paused), site.picture()
    wakes = WAKE if how == "kill" else "while sleep 0.5; do scancel -s CONT --full {job}; scancel -s CONT {job}; done"
    site.wait_running([as_user(site, wakes.format(job=guest), f"--nodelist={site.jobs()[guest].nodes[0]}")])
    noticed = after_ticks(site, daemon, lambda: "ran-while-paused" in kinds(site, guest))
    strikes = [item.feature for item in site.store.violations.strikes() if item.uid == GAMES]
    record = site.store.live.of_jobs({int(guest)})[int(guest)]
    woken = record.woken
    again = after_ticks(site, daemon, lambda: site.store.live.of_jobs({int(guest)})[int(guest)].woken > woken)
    tag = site.jobs()[guest].tag
    stood_s = site.store.live.of_jobs({int(guest)})[int(guest)].stopped_s  # on a slow machine that may be long
    earned_s = tag.stopped_s(time.time()) - stood_s if tag else 0.0
    verdict(
        f"letting one's own paused job go on from another job, in a loop ({how} -CONT)",
        "noticed, a strike, stopped again, no time earned while it ran",
        f"{'noticed' if noticed else 'not noticed'}, {'a strike' if strikes == ['paused'] else strikes}, "
        f"{'stopped again' if again else 'left alone'}, "
        f"{'no' if earned_s < 30 else f'{earned_s:.0f} s of'} time earned while it ran",
    )


def test_a_stopped_process_hides_nobody_from_the_sampler(testbed: Testbed, verdict: Verdict) -> None:
    """What a node measures while a job is paused counts nowhere, so a guest would like to look paused."""
    site = hungry_site(testbed, GAMES)
    decoy = f"out=$(mktemp); {endless(1, 1, 64)} >$out & until [ -s $out ]; do sleep 0.1; done; rm $out"
    hides = f"{decoy}; kill -STOP $!; {HUNGRY}"
    daemon, _, guest = share(site, Sharers(guest=hides, guest_user=USER), **STRICT)
    paused = after_ticks(site, daemon, lambda: "paused" in kinds(site, guest))
    verdict("a stopped process of one's own on the card, to be taken for paused and measured by nobody",
            "measured, and paused for the neighbour's promise",
            "measured, and paused for the neighbour's promise" if paused else "nothing was measured")  # fmt: skip


def test_who_has_left_its_job_stands_still_with_it(testbed: Testbed, verdict: Verdict) -> None:
    """Where Slurm tracks processes by their parents it does not list who was given away to init."""
    site = hungry_site(testbed, GAMES)
    pid = testbed.layout.home / USER / "left"
    work = HUNGRY.partition("; ")[2]
    leaves = f"setsid -f sh -c 'echo $$ >{pid}; exec {work}' </dev/null >/dev/null 2>&1; sleep 600"
    daemon, resident, guest = share(site, Sharers(guest=leaves, guest_user=USER), **STRICT)
    parted = after_ticks(site, daemon, lambda: "paused" in kinds(site, guest))
    still = parted and after_ticks(site, daemon, lambda: stands_still(int(pid.read_text())))
    testbed.run(["scancel", resident])
    goes = after_ticks(site, daemon, lambda: not stands_still(int(pid.read_text())))
    os.kill(int(pid.read_text()), signal.SIGKILL)
    verdict("working on the card in a process that has left the job (setsid -f), which Slurm does not list",
            "measured, stands still with the job, goes on with it", f"{'measured' if parted else 'not measured'}, "
            f"{'stands still' if still else 'works on'} with the job, "
            f"{'goes on' if goes else 'stays so'} with it")  # fmt: skip


@pytest.mark.full
def test_who_stops_itself_again_and_again_is_measured(testbed: Testbed, verdict: Verdict) -> None:
    """At a look it stands still, as often as not; what it used of the card since the last one tells all the same."""
    site = hungry_site(testbed, GAMES)
    hides = f"{HUNGRY} & work=$!; while sleep 0.1; do kill -STOP $work; sleep 0.2; kill -CONT $work; done"
    daemon, resident, guest = share(site, Sharers(guest=hides, guest_user=USER), **STRICT)
    paused = after_ticks(site, daemon, lambda: "paused" in kinds(site, guest))
    stat = site.store.live.of_jobs({int(resident)})[int(resident)].shared.stats.get(ACTIVITY)
    verdict("stopping oneself for most of the time, not to be seen at work",
            "its neighbour's loss is measured, and it is paused",
            f"its neighbour's loss is {'measured' if stat and stat.n >= ENOUGH else 'not measured'}, and it is "
            f"{'paused' if paused else 'left alone'}")  # fmt: skip


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_who_hides_from_every_look_shares_with_nobody(testbed: Testbed, verdict: Verdict, how: str) -> None:
    site = hungry_site(testbed, GAMES)
    script = testbed.layout.home / "lurks.py"
    script.write_text(LURKS)
    hungry = HUNGRY.partition("; ")[2]
    daemon, resident, guest = share(site, Sharers(guest=f"python {script} {how} {hungry}", guest_user=USER), **STRICT)
    parted = after_ticks(site, daemon, lambda: "paused" in kinds(site, guest), 400)
    record = site.store.live.of_jobs({int(resident)})[int(resident)]
    alone = record.alone.stats[ACTIVITY].mean
    verdict(f"watching the samplers wake up, and to {how} before each of their looks",
            "its neighbour loses it, which was not slowed alone",
            f"its neighbour {'loses it' if parted else 'keeps it'}, which was "
            f"{'not slowed' if alone > 80 else f'at {alone:.0f} %'} alone")  # fmt: skip


def test_who_idles_beside_its_guest_gets_nobody_paused(testbed: Testbed, verdict: Verdict) -> None:
    """It was hungry alone. When a neighbour is about to come it does next to nothing, on a card with time to spare."""
    site = hungry_site(testbed, guest_activity_pct=30.0)
    mark = testbed.layout.home / "idle"
    lazy = workload(4, 1, 1024, work_s=600, epochs=200)
    idles = f"{HUNGRY} & hungry=$!; until [ -e {mark} ]; do sleep 0.1; done; kill $hungry; exec {lazy}"
    jobs = Sharers(resident=idles, guest=endless(30, 10, 1024), before_guest=mark.touch)
    daemon, resident, guest = share(site, jobs, **STRICT)

    def measured() -> bool:
        record = site.store.live.of_jobs({int(resident)}).get(int(resident))
        stat = record.shared.stats.get(ACTIVITY) if record else None
        return stat is not None and stat.n >= 3 * ENOUGH

    assert after_ticks(site, daemon, measured), site.picture()
    for _ in range(3):
        tick(site, daemon)
    done = kinds(site, guest) & {"paused", "requeued", "slowed"}
    broken = site.store.violations.broken_promises()
    verdict("idling beside a neighbour to have it paused", "nothing is done to it, no promise counts as broken",
            f"{'nothing' if not done else sorted(done)} is done to it, {'no' if not broken else len(broken)} promise "
            "counts as broken")  # fmt: skip


def test_arrays_do_not_hold_a_tick(site: Site, verdict: Verdict) -> None:
    """Each task has a lease of its own, which the helper ends by a change of its own."""
    for _ in range(3):
        argv = ["sbatch", "--gpus=1", "--mem=100", "--array=0-999", f"--comment=gpushare:{TOKENS[1]}"]
        site.testbed.run(argv, user=USER, input="#!/bin/sh\ntrue\n", cwd=home_of(site.testbed))
    until(lambda: len(site.jobs()) >= 3000)
    report = site.tick()
    ended = sum(count for what, count in report.outcomes.items() if what.startswith("wait:"))
    verdict("three arrays of a thousand tasks with leases", "some changes in a tick but bounded, all are seen",
            f"{'some' if 0 < ended <= MANY else ended} changes in a tick but bounded, "
            f"{'all' if report.jobs >= 3000 else report.jobs} are seen")  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_directories_in_the_spool_are_tried_once(
    site: Site, verdict: Verdict, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    incoming = site.config.spool_dir / "incoming"
    made = f"cd {incoming} && seq -f 'd%.0f.rec/in' {count} | xargs mkdir -p"
    site.testbed.run(["sh", "-c", made], user=USER, cwd=home_of(site.testbed), timeout_s=600)
    daemon, tried = site.daemon(), []
    remove = Spool._remove
    monkeypatch.setattr(Spool, "_remove", lambda *arguments: (tried.append(arguments[1]), remove(*arguments)))
    tick(site, daemon)
    first = len(tried)
    tried.clear()
    for _ in range(2):
        tick(site, daemon)
    once = (first, len(tried)) == (count, 0)
    verdict(f"{count:,} full directories in the spool", "ticks, each is tried once",
            f"ticks, {'each is tried once' if once else f'{first} are tried, then {len(tried)}'}")  # fmt: skip


def test_srun_does_not_share_behind_the_hooks_back(site: Site, verdict: Verdict) -> None:
    """The hook leaves srun alone and says so; the helper tags jobs that the hook has missed."""
    missed = site.submit(0, "--begin=now+1hour")
    site.testbed.run(["scontrol", "update", f"JobId={missed}", "AdminComment="])
    before = set(site.jobs())
    argv = ["srun", "--gres=gpu:1", "--mem=100", f"--comment=gpushare:{TOKENS[1]}", "sleep", "600"]
    argv, env = site.testbed.command(argv, user=USER)
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL, cwd="/") as srun:
        try:
            until(lambda: any(job.running for key, job in site.jobs().items() if key not in before))
            site.tick()
            jobs = site.jobs()
            tags = [jobs[key].tag for key in jobs if key not in before]
        finally:
            srun.kill()
            site.testbed.run(["scancel", *(key for key in site.jobs() if key not in before)], check=False)
    verdict("sharing by srun, which the hook leaves alone", "the batch job is tagged, srun's is not",
            f"the batch job is {'tagged' if jobs[missed].tag else 'not tagged'}, "
            f"srun's is {'not' if tags == [None] else tags}")  # fmt: skip
