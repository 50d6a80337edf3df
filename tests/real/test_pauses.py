"""A pause on a real Slurm: every process of the job stands still, and goes on whatever becomes of who ordered it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gpushare_lab.experiment.submitting import show
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site
from pair_kit import HUNGRY, Sharers, after_ticks, hungry_site, kinds, share, tick

from slurm_gpushare.helper.daemon import Daemon
from slurm_gpushare.node.processes import process_state, stands_still
from slurm_gpushare.protocol.stop_orders import EXPIRY_S, order_file
from slurm_gpushare.store.stored_jobs import EVER

STRICT = {"resident_budget_pct": 1.0, "pause_most_pct": 100.0}
"""Any slow-down breaks this promise."""
SOON_S = 20.0
"""Two looks of a sampler that looks every half second, on a busy machine."""

# A python that starts a child, and a worker in a session of its own, as torchrun does. On SIGTERM it leaves a file.
TREE = """
import signal, subprocess, sys, time
loop = [sys.executable, "-c", "import time\\nwhile True: time.sleep(0.05)"]
subprocess.Popen(loop)
subprocess.Popen(loop, start_new_session=True)
def ends(*_):
    open(sys.argv[1], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, ends)
while True: time.sleep(0.05)
"""


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return hungry_site(testbed)


def steps(site: Site) -> Sharers:
    """A guest with a batch script that works, and a step of two tasks with trees of processes."""
    tree = site.testbed.layout.home / "tree.py"
    tree.write_text(TREE)
    mark = site.testbed.layout.home / "ended"
    step = f"srun -n2 --mem=50 {sys.executable} {tree} {mark}.$SLURM_JOB_ID &\n"
    return Sharers(guest=step + HUNGRY.replace("; ", "\n"), guest_options=("--nodes=1", "--ntasks=2"))


def job_processes(site: Site, job: str) -> set[int]:
    """All processes with the job's id in their environment, wherever they went; slurmstepd has none."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={site.testbed.layout.slurm_conf}".encode()}
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = set((path / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        state = process_state(int(path.name))
        if wanted <= words and state is not None and state.letter not in b"ZX":
            found.add(int(path.name))
    return found


def stands(site: Site, job: str) -> bool:
    pids = job_processes(site, job)
    return bool(pids) and all(map(stands_still, pids))


def goes(site: Site, job: str) -> bool:
    pids = job_processes(site, job)
    return bool(pids) and not any(map(stands_still, pids))


def paused(site: Site, jobs: Sharers) -> tuple[Daemon, str, str]:
    """A guest that stands still: helper, resident, guest."""
    daemon, resident, guest = share(site, jobs, **STRICT)
    assert after_ticks(site, daemon, lambda: "paused" in kinds(site, guest)), site.picture()
    assert after_ticks(site, daemon, lambda: stands(site, guest)), picture(site, guest)
    return daemon, resident, guest


def picture(site: Site, job: str) -> str:
    states = {pid: process_state(pid) for pid in job_processes(site, job)}
    order = order_file(site.config.spool_dir, site.jobs()[job].nodes[0])
    return f"{states}\n{order.read_text() if order.exists() else 'no order'}\n{site.picture()}"


def said(site: Site, job: str, *words: str) -> str:
    return " ".join(site.testbed.run([sys.executable, "-m", "slurm_gpushare", "job", job, *words]).stdout.split())


def test_all_processes_of_a_job_of_several_steps_stand_still_and_go_on(site: Site) -> None:
    daemon, resident, guest = share(site, steps(site), **STRICT)
    before = show(site.testbed, guest)["TimeLimit"]
    assert wait_until(lambda: len(job_processes(site, guest)) >= 8, 60), "script, srun, two trees of three, workload"
    assert after_ticks(site, daemon, lambda: site.jobs()[guest].paused), site.picture()
    assert after_ticks(site, daemon, lambda: stands(site, guest)), picture(site, guest)
    assert goes(site, resident), "its neighbour runs"
    job = site.jobs()[guest]
    assert (job.state, job.cpus) == ("RUNNING", job.cpus), "it keeps its CPUs"
    assert f"Job {guest}: RUNNING, paused" in said(site, guest)
    assert f"paused, so that job {resident} gets the speed it was promised" in said(site, guest)
    for _ in range(3):
        tick(site, daemon)
        assert stands(site, guest), picture(site, guest)
    assert after_ticks(site, daemon, lambda: "extended" in kinds(site, guest)), site.picture()
    assert show(site.testbed, guest)["TimeLimit"] > before, "its clock runs: the time is given back"

    site.testbed.run(["scancel", resident])
    assert after_ticks(site, daemon, lambda: goes(site, guest)), picture(site, guest)
    assert after_ticks(site, daemon, lambda: "resumed" in kinds(site, guest)), site.picture()
    tag = site.jobs()[guest].tag
    assert tag is not None
    assert (tag.paused, tag.stopped_before_s > 0) == (None, True)
    (span,) = site.store.sharing.of_jobs({int(guest): EVER})
    assert span.paused_s > 0, "both owners' figures leave the pause out"
    record = lambda: site.store.live.of_jobs({int(guest)})[int(guest)]  # noqa: E731
    assert after_ticks(site, daemon, lambda: record().stopped_s > 0), "its node says how long it stood"
    assert record().woken == 0
    (told,) = json.loads(site.testbed.run([sys.executable, "-m", "slurm_gpushare", "job", guest, "--json"]).stdout)
    assert told["paused_s"] >= tag.stopped_before_s


def test_an_array_task_stands_still_by_an_order_in_the_database(site: Site) -> None:
    """Nodes that share no file system with the controller."""
    site.configure(RecordsTo="store")
    jobs = steps(site)
    daemon, resident, task = share(site, replace(jobs, guest_options=(*jobs.guest_options, "--array=3")), **STRICT)
    job = str(site.jobs()[task].raw_id)
    up = lambda: len(job_processes(site, job)) >= 8  # noqa: E731
    assert after_ticks(site, daemon, up), "script, srun, two trees of three, workload"
    assert after_ticks(site, daemon, lambda: site.jobs()[task].paused), site.picture()
    assert after_ticks(site, daemon, lambda: stands(site, job)), picture(site, task)
    assert goes(site, resident)
    assert not order_file(site.config.spool_dir, site.jobs()[task].nodes[0]).exists()
    site.testbed.run(["scancel", resident])
    assert after_ticks(site, daemon, lambda: goes(site, job)), picture(site, task)
    assert after_ticks(site, daemon, lambda: site.store.live.of_jobs({int(job)})[int(job)].stopped_s > 0)


def helper_is_gone(site: Site, guest: str) -> None:
    """Nobody ticks any more."""


def spool_is_gone(site: Site, guest: str) -> None:
    site.config.spool_dir.rename(site.config.spool_dir.with_name("unmounted"))


def sampler_is_killed(site: Site, guest: str) -> None:
    node = site.jobs()[guest].nodes[0]
    pid = (site.config.state_dir / "nodes" / node / "jobs" / guest).read_text().split()[0]
    os.kill(int(pid), signal.SIGKILL)


def slurmctld_is_killed(site: Site, guest: str) -> None:
    site.testbed.kill("slurmctld")


def slurmctld_is_restarted(site: Site, guest: str) -> None:
    site.testbed.restart("slurmctld")


@pytest.mark.parametrize(
    "breaks",
    [
        helper_is_gone, spool_is_gone, sampler_is_killed, slurmctld_is_killed,
        pytest.param(slurmctld_is_restarted, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_job_goes_on_by_itself_when_nobody_keeps_it(site: Site, breaks: Callable[[Site, str], None]) -> None:
    _, _, guest = paused(site, Sharers())
    breaks(site, guest)
    assert wait_until(lambda: goes(site, guest), EXPIRY_S + SOON_S), "it stands still for ever"


def cancel(site: Site, guest: str) -> None:
    site.testbed.run(["scancel", guest])


def requeue(site: Site, guest: str) -> None:
    site.testbed.run(["scontrol", "requeue", guest])


def reach_the_limit(site: Site, guest: str) -> None:
    """Slurm looks at limits twice a minute; the job has run for longer than this one."""
    site.testbed.run(["scontrol", "update", f"JobId={guest}", "TimeLimit=1"])
    assert wait_until(lambda: guest not in site.jobs() or site.jobs()[guest].state == "COMPLETING", 120)


@pytest.mark.parametrize("ending", [cancel, requeue, pytest.param(reach_the_limit, marks=pytest.mark.full)])
def test_what_ends_a_running_job_ends_a_paused_one_as_fast(site: Site, ending: Callable[[Site, str], None]) -> None:
    _, resident, guest = paused(site, steps(site))
    ended = site.testbed.layout.home / f"ended.{guest}"
    pids = job_processes(site, guest)
    ending(site, guest)
    begun = time.monotonic()
    assert wait_until(lambda: not any(map(process_state, pids)), 15), picture(site, guest)
    assert time.monotonic() - begun < 15
    assert ended.exists(), "its processes were told, and had time to write what they must"
    assert goes(site, resident)
