"""What faults are done to: the testbed, the helper as its unit would run it, and Slurm's commands as it sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gpushare_lab.emulator.library import compile_c
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.daemons import last_lines
from gpushare_lab.testbed.processes import marked_pids, recorded_pid, wait_until
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.helper.lease import Held, in_charge
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store.hookfile import HookFile

COMMANDS = ("squeue", "sinfo", "scontrol", "sacct")
WATCHDOG_S = 10.0
_FAULTY = """#!/bin/sh
read -r mode <{mode} 2>/dev/null
case $mode in
slow) sleep 30 ;;
garbage) head -c 4000 /dev/urandom; exit 0 ;;
failing) echo "{name}: error: something else" >&2; exit 1 ;;
partial) /usr/bin/{name} "$@" | head -c 700; exit 0 ;;
esac
exec /usr/bin/{name} "$@"
"""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the helper's process holds."""

    at_s: float
    rss_mib: float
    files: int
    threads: int


@dataclass
class ChaosSite:
    """A testbed under faults."""

    testbed: Testbed
    sharing: bool = True
    """False: without a helper, for the control run."""
    vitals: list[Vitals] = field(default_factory=list)
    crashes: list[float] = field(default_factory=list)
    """When slurmctld was killed, in unix time."""
    _helper: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.config: Config = load_config(self.testbed.layout.gpushare_conf)
        self.store_path = Path(self.config.store_url.removeprefix("sqlite:///"))
        self.log = self.testbed.layout.log / "chaos-helper.log"
        self.slurm = Slurm(partial(runner.run, environ=os.environ | self.testbed.env))
        self._bin = self.testbed.dir / "chaos-bin"
        self._bin.mkdir(exist_ok=True)
        self._mode = self._bin / "mode"
        self.commands("fine")
        for name in COMMANDS:
            (self._bin / name).write_text(_FAULTY.format(mode=self._mode, name=name))
            (self._bin / name).chmod(0o755)
        self.skew = self.testbed.dir / "skew"
        self.skew.write_text("0\n")
        self._skew_library = compile_c(
            self.testbed.layout.lib / "skew.so", ["-shared", "-fPIC", str(Path(__file__).with_name("skew.c")), "-ldl"]
        )

    def commands(self, mode: str) -> None:
        """How Slurm's commands behave for the helper: ``fine``, ``slow``, ``garbage``, ``failing`` or ``partial``."""
        self._mode.write_text(f"{mode}\n")

    # -- the helper ------------------------------------------------------------------------------
    def start_helper(self) -> None:
        if self.sharing:
            self._helper = self.spawn_helper()

    def spawn_helper(self, *, own_state: str = "", before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """A helper; `own_state` names a StateDir of its own, and `before` is put before its command."""
        argv, env = self.testbed.command(
            [sys.executable, "-m", "slurm_gpushare", "backfill"], user=self.testbed.slurm_user
        )
        argv = [*before, *argv]
        if own_state:
            env |= self._settings_of(own_state)
        extra = {
            "PATH": f"{self._bin}:{env['PATH']}",
            "LD_PRELOAD": str(self._skew_library),
            "GPUSHARE_SKEW": str(self.skew),
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, env=env | extra, stdout=log, stderr=log, cwd="/")

    def _settings_of(self, name: str) -> dict[str, str]:
        """What leads a helper to settings that differ in StateDir alone."""
        state = self.config.state_dir.with_name(name)
        self.shell(f"mkdir -p {state}; chown --reference={self.config.state_dir} {state}")
        conf = self.testbed.layout.gpushare_conf
        own = conf.with_name(f"gpushare.{name}.conf")
        own.write_text(with_keys(conf.read_text(), {"StateDir": str(state)}))
        return {"GPUSHARE_CONF": str(own), "GPUSHARE_LAST_GOOD": str(state / "good")}

    def in_charge(self) -> Held | None:
        """Which helper holds the lease."""
        return in_charge(self.config, self.slurm)

    def helper_pid(self) -> int | None:
        """The helper's own process id, which it writes into its lock."""
        try:
            pid = int((self.config.state_dir / "backfill.lock").read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return pid

    def signal_helper(self, number: signal.Signals) -> None:
        if (pid := self.helper_pid()) is not None:
            os.kill(pid, number)

    def kill_helper(self) -> None:
        """SIGKILL, then what its unit does: start it again."""
        if self._helper is None:
            return
        self.signal_helper(signal.SIGKILL)
        self._helper.kill()
        self._helper.wait(60)
        self.start_helper()

    def revive_helper(self) -> None:
        """What its unit does with a helper that ended by itself: start it again."""
        if self._helper is not None and self._helper.poll() is not None:
            self.start_helper()

    def stop_helper(self) -> None:
        """As ``systemctl stop`` does, with the release that follows it."""
        if self._helper is None:
            return
        self.signal_helper(signal.SIGCONT)
        self.signal_helper(signal.SIGTERM)
        try:
            self._helper.wait(90)
        except subprocess.TimeoutExpired:
            self.signal_helper(signal.SIGKILL)
            self._helper.wait(30)
        self._helper = None
        self.gpushare("release", "--quiet", check=False)

    def is_alive(self, since_s: float = 0.0) -> bool:
        """Whether the helper has beaten lately, as the hook and the watchdog see it, and not before `since_s`."""
        beat_s = HookFile(self.config.hook_file).heartbeat_s()
        return beat_s is not None and abs(time.time() - beat_s) < self.config.heartbeat_s and beat_s >= since_s

    def wait_alive(self) -> None:
        if self.sharing and not wait_until(self.is_alive, 120):
            raise GpushareError(f"the helper does not recover: {last_lines(self.log)}")

    def gpushare(self, *words: str, check: bool = True) -> str:
        """A ``gpushare`` command of SlurmUser's."""
        command = [sys.executable, "-m", "slurm_gpushare", *words]
        return self.testbed.run(command, user=self.testbed.slurm_user, check=check, timeout_s=180).stdout

    # -- beside it -------------------------------------------------------------------------------
    def watch(self) -> threading.Thread:
        """The watchdog's timer, and a look at the helper's process every now and then."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        return thread

    def end_watch(self, thread: threading.Thread) -> None:
        self._stop.set()
        thread.join(120)

    def _watch(self) -> None:
        while not self._stop.wait(WATCHDOG_S):
            self._look()
            if self.sharing and not self.is_alive():
                try:
                    self.gpushare("release", "--if-stale", "--quiet", check=False)
                except GpushareError:
                    continue  # slurmctld is away: the timer comes again

    def _look(self) -> None:
        pid = self.helper_pid()
        try:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
            )
            files = len(os.listdir(f"/proc/{pid}/fd"))
            memory_kib = int(status["VmRSS"].split()[0])
        except (OSError, KeyError):  # it ends just now
            return
        self.vitals.append(Vitals(time.time(), memory_kib / 1024, files, int(status["Threads"])))

    def paused(self) -> set[str]:
        """The jobs that their nodes keep standing still; none while slurmctld does not answer."""
        try:
            return {job.key for job in self.slurm.jobs() if job.paused}
        except SlurmError:
            return set()

    def shared_nodes(self) -> list[str]:
        """Where two jobs have a card together; none while slurmctld does not answer."""
        try:
            placed = Counter(job.tag.placed for job in self.slurm.jobs() if job.running and job.tag and job.tag.placed)
        except SlurmError:
            return []
        return [card.rpartition(":")[0] for card, jobs in placed.items() if jobs > 1]

    def shell(self, script: str) -> str:
        """A shell script as root, inside the testbed."""
        return self.testbed.run(["sh", "-c", script], check=False, timeout_s=180).stdout

    def processes(self, word: str) -> list[int]:
        """The testbed's processes whose command line has a word."""
        return sorted(marked_pids(self.testbed.dir, word.encode()))

    def daemon_pid(self, name: str) -> int | None:
        return recorded_pid(self.testbed.layout.run / f"{name}.pid")
