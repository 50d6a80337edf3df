"""All faults, in the order in which ``make chaos`` makes them, and those of helper, telemetry and Slurm's commands."""

from __future__ import annotations

import subprocess
from functools import partial

from gpushare_lab.chaos import helper_faults
from gpushare_lab.chaos.fault import Fault, Pause
from gpushare_lab.chaos.node_faults import samplers_die, scripts_die
from gpushare_lab.chaos.site import ChaosSite
from gpushare_lab.chaos.slurm_faults import (
    accounting_away,
    crash,
    crash_often,
    drain,
    node_down,
    reboot,
    reconfigure,
    refuse,
    restart,
    with_a_paused_job,
    with_sharers,
)
from gpushare_lab.chaos.store_faults import (
    damaged,
    deleted,
    full_disk,
    hook_file,
    locked,
    read_only,
    replaced,
    settings,
)
from gpushare_lab.emulator.node import clear_faults, set_fault
from gpushare_lab.testbed.processes import wait_until

PAUSED_SOON = ("long", "shared")
"""Residents that are still there when their guest was found to slow them."""

MANY_WAIT = ("array", "shared")
"""A card is held for those who wait for it."""


def _calm(site: ChaosSite, pause: Pause) -> None:
    pause(30)


def _no_room(site: ChaosSite, pause: Pause) -> None:
    """The helper cannot make any file larger than it is: every write of the store fails half-way."""
    pid = str(site.helper_pid() or 0)
    for limit, seconds in (("20000", 15), ("unlimited", 2)):
        subprocess.run(["prlimit", "--pid", pid, f"--fsize={limit}:unlimited"], check=False, capture_output=True)
        pause(seconds)


def _nvml(line: str, site: ChaosSite, pause: Pause) -> None:
    nodes = site.testbed.state.shape.node_names
    for node in nodes:
        set_fault(site.testbed.layout.emu, node, line)
    pause(12)
    for node in nodes:
        clear_faults(site.testbed.layout.emu, node)


def _dead_spool(site: ChaosSite, pause: Pause) -> None:
    places = [place for name in ("incoming", "nodes") if (place := site.config.spool_dir / name).is_dir()]
    for place in places:
        place.rename(place.with_name(f"{place.name}.away"))
        place.write_text("not a directory\n")
    pause(20)
    for place in places:
        place.unlink()
        place.with_name(f"{place.name}.away").rename(place)


# -- slurm's commands ----------------------------------------------------------------------------
def _commands(mode: str, seconds: float, site: ChaosSite, pause: Pause) -> None:
    site.commands(mode)
    pause(seconds)
    site.commands("fine")


def _long_queue(site: ChaosSite, pause: Pause) -> None:
    """Fifty arrays of a thousand tasks that ask for a card each: the helper reads and passes over all of them."""
    sbatch = (
        "sbatch --parsable --hold --array=0-999 --job-name=long --mem=10 --gres=gpu:1 --output=/dev/null --wrap true"
    )
    waiting = "squeue -h -r -n long | wc -l"
    site.shell("\n".join([sbatch] * 50))
    if (found := site.shell(waiting).strip()) != "50000":
        raise AssertionError(f"{found} jobs wait instead of 50,000")
    pause(25)
    site.shell("scancel -n long")
    if not wait_until(lambda: site.shell(waiting).strip() == "0", 60):
        raise AssertionError("the queue did not become empty again")


def soak(minutes: float) -> Fault:
    """Nothing breaks for long: what grows then, grows without end."""
    return Fault(f"nothing, for {minutes:g} minutes", "soak", lambda site, pause: pause(60 * minutes))


FAULTS = (
    Fault("nothing", "calm", _calm, short=True),
    Fault("kill -9 of the helper 5 times", "helper", partial(helper_faults.killed, 5), short=True),
    Fault("kill -9 of the helper 50 times", "helper", partial(helper_faults.killed, 50)),
    Fault("helper stands still for twice its heartbeat", "helper", helper_faults.stop_and_continue, short=True),
    Fault("two more helpers", "helper", helper_faults.two_helpers),
    Fault("helper stopped for twice its heartbeat", "helper", helper_faults.away),
    Fault("no room to write for the helper", "helper", _no_room),
    Fault("clock jumps by two hours both ways", "helper", helper_faults.clock_jumps),
    Fault("no process more for the helper", "helper", partial(helper_faults.limited, "nproc=1", 10)),
    Fault("no file more for the helper", "helper", helper_faults.no_files),
    Fault("SpoolDir/hold removed", "helper", helper_faults.hold_removed),
    Fault("SpoolDir/hold read-only", "helper", partial(helper_faults.hold_mounted, "ro")),
    Fault("SpoolDir/hold full", "helper", partial(helper_faults.hold_mounted, "size=8k")),
    Fault("lease's holder stands still for a minute", "helper", helper_faults.holder_stopped),
    Fault("slurmctld restarts", "slurm", partial(restart, "slurmctld"), short=True),
    Fault("slurmctld restarts while jobs share", "slurm", partial(with_sharers, partial(restart, "slurmctld"))),
    Fault("kill -9 of slurmctld 3 times", "slurm", partial(crash_often, "slurmctld", 3.0)),
    Fault("kill -9 of slurmctld while jobs share", "slurm",
          partial(with_sharers, partial(crash, "slurmctld", 3.0))),
    Fault("slurmctld reconfigures", "slurm", reconfigure),
    Fault("slurmctld refuses for a minute", "slurm", refuse),
    Fault("kill -9 of a slurmd", "slurm", partial(crash, "slurmd-gpu0", 5.0)),
    Fault("node down with jobs that share", "slurm", node_down, kills=True),
    Fault("node drained", "slurm", drain),
    Fault("node reboots", "slurm", reboot, kills=True),
    Fault("slurmctld fails over to a backup and back", "slurm", helper_faults.failover),
    Fault("slurmdbd and MariaDB away", "slurm", accounting_away),
    Fault("store locked for 30 s", "store", locked),
    Fault("store's disk full in the middle of a transaction", "store", full_disk),
    Fault("store truncated", "store", partial(damaged, "truncated")),
    Fault("store corrupt", "store", partial(damaged, "corrupt"), short=True),
    Fault("store read-only", "store", read_only),
    Fault("store deleted", "store", deleted, short=True),
    Fault("store replaced by a backup", "store", replaced),
    Fault("hook.sqlite deleted", "store", partial(hook_file, "deleted")),
    Fault("hook.sqlite garbage", "store", partial(hook_file, "garbage")),
    Fault("gpushare.conf broken", "settings", partial(settings, "broken"), short=True),
    Fault("gpushare.conf away", "settings", partial(settings, "away")),
    Fault("NodeUsers names nobody", "settings", helper_faults.unknown_node_user),
    Fault("gpushare.conf touched while slurmctld is away", "settings", helper_faults.touched_while_slurm_is_away),
    Fault("NVML hangs", "telemetry", partial(_nvml, "* hang 5")),
    Fault("GPU lost", "telemetry", partial(_nvml, "* 15"), short=True),
    Fault("kill -9 of samplers", "telemetry", samplers_die),
    Fault("spool on a dead file system", "telemetry", _dead_spool),
    Fault("prologs and epilogs die half-way", "telemetry", scripts_die, kills=True,
          kinds=MANY_WAIT),
    Fault("Slurm's commands fail", "commands", partial(_commands, "failing", 10)),
    Fault("Slurm's commands print garbage", "commands", partial(_commands, "garbage", 10), short=True),
    Fault("Slurm's commands print half an answer", "commands", partial(_commands, "partial", 10)),
    Fault("Slurm's commands take 30 s", "commands", partial(_commands, "slow", 40)),
    Fault("a queue of 50000 jobs", "commands", _long_queue),
    # Last: what the helper learns then lets it share less.
    Fault("a reload every 5 s while a job is paused", "settings", partial(helper_faults.reloads, 30.0),
          kinds=PAUSED_SOON),
    Fault("slurmctld restarts while a job is paused", "slurm",
          partial(with_a_paused_job, partial(restart, "slurmctld")), kinds=PAUSED_SOON),
    Fault("kill -9 of slurmctld while a job is paused", "slurm",
          partial(with_a_paused_job, partial(crash, "slurmctld", 3.0)), kinds=PAUSED_SOON),
)  # fmt: skip
