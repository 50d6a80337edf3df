"""Faults of Slurm itself: its daemons, its nodes, its accounting."""

from __future__ import annotations

import os
import random
import signal
import time

from gpushare_lab.chaos.fault import Inject, Pause
from gpushare_lab.chaos.site import ChaosSite
from gpushare_lab.chaos.stream import RATES, ROUGH, set_rates
from gpushare_lab.testbed.backup_controller import resume_nodes
from gpushare_lab.testbed.processes import with_descendants

PATIENCE_S = 60.0
"""Twice so long a fault waits for jobs that share, or for one that is paused."""
BETWEEN_S = (6.0, 14.0)
"""After a kill, at random. The stream waits while slurmctld is away: equal pauses would keep jobs in step with
kills, so that always the same ones end just before the next, and are forgotten."""
CRASHES = 3
"""Kills of slurmctld in one fault: what it forgets in one of them is chance."""


def restart(name: str, site: ChaosSite, pause: Pause) -> None:
    site.testbed.restart(name)
    pause(12)


def crash(name: str, away_s: float, site: ChaosSite, pause: Pause) -> None:
    if name == "slurmctld":
        site.crashes.append(time.time())
    site.testbed.kill(name)
    pause(away_s)
    site.testbed.restart(name)
    pause(random.uniform(*BETWEEN_S))


def crash_often(name: str, away_s: float, site: ChaosSite, pause: Pause) -> None:
    for _ in range(CRASHES):
        crash(name, away_s, site, pause)


def with_a_paused_job(inject: Inject, site: ChaosSite, pause: Pause) -> None:
    """Jobs begin to slow others far more than was promised: once the helper has paused one, break something."""
    set_rates(site.testbed, ROUGH)
    try:
        begun = time.monotonic()
        while not site.paused():
            if time.monotonic() > begun + 2 * PATIENCE_S:
                raise AssertionError("the helper paused nobody")
            pause(0.5)
        inject(site, pause)
    finally:
        set_rates(site.testbed, RATES)


def with_sharers(inject: Inject, site: ChaosSite, pause: Pause) -> None:
    """Wait until two jobs have a card together, and then break something."""
    _shared_node(site, pause)
    inject(site, pause)


def _shared_node(site: ChaosSite, pause: Pause) -> str:
    """A node where two jobs have a card together; waits for them."""
    begun = time.monotonic()
    while not (nodes := site.shared_nodes()):
        if time.monotonic() > begun + 2 * PATIENCE_S:
            raise AssertionError("nobody shared")
        pause(0.5)
    return nodes[0]


def refuse(site: ChaosSite, pause: Pause) -> None:
    site.testbed.stop("slurmctld")
    pause(60)
    site.testbed.restart("slurmctld")
    pause(5)


def reconfigure(site: ChaosSite, pause: Pause) -> None:
    for _ in range(3):
        site.testbed.reconfigure()
        pause(3)


def _node(site: ChaosSite, index: int) -> str:
    return site.testbed.state.shape.node_names[index]


def node_down(site: ChaosSite, pause: Pause) -> None:
    node = _shared_node(site, pause)
    site.shell(f"scontrol update nodename={node} state=down reason=chaos")
    pause(8)
    site.shell(f"scontrol update nodename={node} state=resume")
    pause(5)


def drain(site: ChaosSite, pause: Pause) -> None:
    site.shell(f"scontrol update nodename={_node(site, 1)} state=drain reason=chaos")
    pause(12)
    site.shell(f"scontrol update nodename={_node(site, 1)} state=resume")


def reboot(site: ChaosSite, pause: Pause) -> None:
    """All of a node's processes end at once, samplers too; then its slurmd comes up again."""
    name = f"slurmd-{_node(site, 1)}"
    pid = site.daemon_pid(name)
    victims = with_descendants([pid]) if pid else set()
    for victim in victims:
        kill(victim)
    pause(5)
    site.testbed.restart(name)
    heal_nodes(site)
    pause(8)


def accounting_away(site: ChaosSite, pause: Pause) -> None:
    site.testbed.stop("slurmdbd")
    site.testbed.kill("mariadbd")
    pause(20)
    site.testbed.restart("mariadbd")
    site.testbed.restart("slurmdbd")
    pause(3)


def heal_nodes(site: ChaosSite) -> None:
    """What an administrator does after a prolog or an epilog died: the nodes and the held jobs are let go."""
    resume_nodes(site.testbed)
    site.shell("squeue -h -t PD -o '%i %r' | sed -n 's/ .*[Hh]eld.*//p' | xargs -rn1 scontrol release")


def kill(pid: int) -> bool:
    """Whether it was still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
