"""Faults of the helper: its process, what it is allowed, what it tells nodes, and two of them at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial

from gpushare_lab.chaos.fault import Pause
from gpushare_lab.chaos.site import ChaosSite
from gpushare_lab.chaos.slurm_faults import heal_nodes, with_a_paused_job
from gpushare_lab.testbed.backup_controller import HOST, backup_controller, there
from slurm_gpushare.protocol.errors import GpushareError

PATIENCE_S = 90.0
RELOAD_EVERY_S = 5.0
STOPPED_S = 60.0
"""Longer than a lease is believed, and than another one waits before it takes it."""


def killed(times: int, site: ChaosSite, pause: Pause) -> None:
    dice = random.Random(times)
    for _ in range(times):
        pause(dice.uniform(0.2, 4.0))
        site.kill_helper()


def stop_and_continue(site: ChaosSite, pause: Pause) -> None:
    site.signal_helper(signal.SIGSTOP)
    pause(2.0 * site.config.heartbeat_s)
    site.signal_helper(signal.SIGCONT)


def two_helpers(site: ChaosSite, pause: Pause) -> None:
    others = [site.spawn_helper() for _ in range(2)]
    pause(8)
    for other in others:
        if other.wait(60) == 0:
            raise AssertionError("a second helper ran")


def away(site: ChaosSite, pause: Pause) -> None:
    site.stop_helper()
    pause(2.0 * site.config.heartbeat_s)
    site.start_helper()


def limited(limit: str, seconds: float, site: ChaosSite, pause: Pause) -> None:
    """One of the process's limits is at nothing for a while; ``prlimit`` names it. The helper must outlive that."""
    pid = site.helper_pid()
    subprocess.run(["prlimit", "--pid", str(pid), f"--{limit}:"], check=False, capture_output=True)
    pause(seconds)
    name = limit.partition("=")[0]
    subprocess.run(["prlimit", "--pid", str(pid), f"--{name}={_hard(pid, name)}:"], check=False, capture_output=True)
    pause(2)
    if site.helper_pid() != pid:
        raise AssertionError("the helper ended")


def _hard(pid: int | None, name: str) -> str:
    columns = ["--output=HARD", "--noheadings", "--raw"]
    return subprocess.run(["prlimit", "--pid", str(pid), f"--{name}", *columns], capture_output=True, text=True,
                          check=False).stdout.strip()  # fmt: skip


def no_files(site: ChaosSite, pause: Pause) -> None:
    """Not one more file can be opened."""
    used = max(map(int, os.listdir(f"/proc/{site.helper_pid()}/fd")), default=0)
    limited(f"nofile={used + 1}", 12, site, pause)


def clock_jumps(site: ChaosSite, pause: Pause) -> None:
    for seconds in (7200, -7200, 0):
        site.skew.write_text(f"{seconds}\n")
        pause(8)


def hold_removed(site: ChaosSite, pause: Pause) -> None:
    """The directory in which nodes are told something is gone, twice."""
    for _ in range(2):
        site.shell(f"rm -r {site.config.spool_dir}/hold")
        pause(6)


def hold_mounted(options: str, site: ChaosSite, pause: Pause) -> None:
    """Another file system is where nodes are told something: one that is read-only, or full."""
    pid, hold = site.helper_pid(), site.config.spool_dir / "hold"
    fill = f"dd if=/dev/zero of={hold}/ballast bs=4k 2>/dev/null"
    own = f"chown --reference={hold}/.. {hold}"
    site.shell(f"mkdir -p {hold}; {own}; mount -t tmpfs -o {options},mode=755 chaos {hold}; {own}; {fill}")
    try:
        pause(15)
    finally:
        site.shell(f"umount -l {hold}")
    pause(3)
    if site.helper_pid() != pid:
        raise AssertionError("the helper ended")


def unknown_node_user(site: ChaosSite, pause: Pause) -> None:
    """Read at a reload it changes nothing; read at a start it is left out."""
    conf, pid = site.testbed.layout.gpushare_conf, site.helper_pid()
    good = conf.read_text()
    conf.write_text(good + "NodeUsers=root,nosuchuser\n")
    pause(6)
    if site.helper_pid() != pid:
        raise AssertionError("the helper ended")
    site.kill_helper()
    pause(8)
    conf.write_text(good)
    pause(3)


def touched_while_slurm_is_away(site: ChaosSite, pause: Pause) -> None:
    pid = site.helper_pid()
    site.testbed.stop("slurmctld")
    for reload in (partial(os.utime, site.testbed.layout.gpushare_conf), partial(site.signal_helper, signal.SIGHUP)):
        reload()
        pause(15)
    site.testbed.restart("slurmctld")
    pause(5)
    if site.helper_pid() != pid:
        raise AssertionError("the helper ended")


def reloads(seconds: float, site: ChaosSite, pause: Pause) -> None:
    """A job is paused, and stays so under one reload after the other, until its neighbour has budget again."""

    def storm(site: ChaosSite, pause: Pause) -> None:
        for _ in range(round(seconds / RELOAD_EVERY_S)):
            site.signal_helper(signal.SIGHUP)
            pause(RELOAD_EVERY_S)

    with_a_paused_job(storm, site, pause)


def _until(done: Callable[[], bool], what: str, pause: Pause) -> None:
    begun = time.monotonic()
    while not done():
        if time.monotonic() > begun + PATIENCE_S:
            raise AssertionError(what)
        pause(1.0)


def _number(site: ChaosSite) -> int:
    try:
        held = site.in_charge()
    except (OSError, GpushareError):
        return 0
    return held.number if held else 0


def holder_stopped(site: ChaosSite, pause: Pause) -> None:
    """The helper in charge stands still for a minute, and another one takes over; let go, it places nobody."""
    before, begun, said = _number(site), time.monotonic(), len(site.log.read_text())
    other = site.spawn_helper(own_state="state2")
    try:
        pause(3)
        site.signal_helper(signal.SIGSTOP)
        _until(lambda: _number(site) > before, "nobody took the lease", pause)
        pause(max(0.0, STOPPED_S - (time.monotonic() - begun)))
        site.signal_helper(signal.SIGCONT)
        _until(lambda: "event=lease lost=True" in site.log.read_text()[said:], "the first did not notice", pause)
        pause(5)
    finally:
        site.signal_helper(signal.SIGCONT)
        other.terminate()
        other.wait(60)
    _until(lambda: _number(site) > before + 1, "the first did not take the lease back", pause)


def failover(site: ChaosSite, pause: Pause) -> None:
    """slurmctld moves to a backup controller, and the helper's work with it; then back."""

    def host() -> str:
        try:
            held = site.in_charge()
        except (OSError, GpushareError):
            return ""
        return held.host if held else ""

    with backup_controller(site.testbed):
        other = site.spawn_helper(own_state="state2", before=there(()))
        try:
            pause(8)
            site.testbed.stop("slurmctld")
            _until(lambda: host() == HOST, "the helper of the backup controller did not take over", pause)
            # A backup of 24.11 does not know the shards of nodes that have some in use until it is told to look.
            site.shell("scontrol reconfigure")
            pause(5)
            heal_nodes(site)
            pause(5)
            site.testbed.restart("slurmctld")
            _until(lambda: host() not in ("", HOST), "the helper of the first did not take over again", pause)
            pause(5)
        finally:
            other.terminate()
            other.wait(60)
    heal_nodes(site)
    pause(5)
