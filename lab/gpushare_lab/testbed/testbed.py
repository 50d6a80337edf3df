"""A throw-away Slurm on one machine: bring it up, use it, change it, take it down."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpushare_lab.emulator import build_library
from gpushare_lab.testbed import configuration, database, directories, namespace, rootfs
from gpushare_lab.testbed.daemons import Background
from gpushare_lab.testbed.environment import command_env, user_command
from gpushare_lab.testbed.layout import MARKER, Layout, Ports, Progress, Shape, State, default_dir
from gpushare_lab.testbed.machine import check_space, choose_slurm_user, slurm_release
from gpushare_lab.testbed.ports import claimed_ports
from gpushare_lab.testbed.processes import marked_pids, recorded_pid, stop_pids, wait_until, with_descendants
from gpushare_lab.testbed.services import SLURMD, services
from slurm_gpushare.protocol.errors import BadInput, GpushareError


def _silent(_: str) -> None: ...


class Testbed:
    """One testbed, known by its directory; any process may make this object for a testbed that runs."""

    __test__ = False  # pytest: not a test class

    def __init__(self, directory: Path | None = None, progress: Progress = _silent) -> None:
        self.layout = Layout((directory or default_dir()).absolute())
        self._progress = progress
        self._daemons: dict[str, Background] = {}

    # -- what it is -----------------------------------------------------------------------------

    @property
    def dir(self) -> Path:
        return self.layout.root

    @property
    def state(self) -> State:
        self.layout.check_owner()
        state = self.layout.read_state()
        if state is None:
            raise GpushareError(f"{self.dir}: no testbed here", "Start one with 'gpushare-lab testbed up'.")
        return state

    @property
    def release(self) -> str:
        """Slurm's version, as ``sinfo -V`` prints it."""
        return self.state.release

    @property
    def slurm_user(self) -> str:
        """Who runs slurmctld, slurmdbd and the helper."""
        return self.state.slurm_user

    @property
    def shape(self) -> Shape:
        return self.state.shape

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, with all that leads commands to this Slurm."""
        return command_env(self.layout)

    def daemons(self) -> dict[str, Background]:
        """Every daemon by name, in the order in which they start."""
        if not self._daemons:
            state = self.state
            found = services(self.layout, state, self._enter(state), self._ask)
            self._daemons = {daemon.name: daemon for daemon in found}
        return self._daemons

    def running(self) -> dict[str, int | None]:
        """Name of each daemon and its pid, None where it is dead."""
        return {name: daemon.pid() for name, daemon in self.daemons().items()}

    def strays(self) -> set[int]:
        """Processes of this testbed that are no daemon: jobs, samplers, and what a test left in the background."""
        return marked_pids(self.dir) - with_descendants(self._recorded().values())

    # -- up and down ----------------------------------------------------------------------------

    def up(
        self,
        shape: Shape | None = None,
        *,
        accounting: bool = True,
        suite: str | None = None,
        plain: bool = False,
    ) -> Testbed:
        """Start everything, or raise and leave nothing behind. `plain`: Slurm as it is without us."""
        suite = rootfs.check_suite(suite) if suite else rootfs.host_suite()
        shape = shape or Shape()
        self.layout.check()
        if os.geteuid():
            raise GpushareError("testbed: only root can run the jobs of several users and make device files")
        with claimed_ports(shape.nodes) as ports, self._lock():
            self._refuse_or_clean()
            try:
                self._start(shape, accounting, suite, plain, ports)
            except BaseException as why:
                self._stop_everything()
                self._remove_directory()
                if isinstance(why, OSError):
                    raise GpushareError(f"testbed: {why.filename or self.dir}: {why.strerror}") from why
                raise
        return self

    def down(self, *, purge: bool = False) -> None:
        """Stop every process of this testbed; `purge` removes its directory too."""
        if not self.dir.exists():
            return
        with self._lock():
            self._require_ours()
            self._stop_everything()
            if purge:
                self._remove_directory()

    def _start(self, shape: Shape, accounting: bool, suite: str, plain: bool, ports: Ports) -> None:
        layout = self.layout
        layout.claim()
        check_space(self.dir)
        mark = {MARKER: str(self.dir)}
        root = None if suite == rootfs.host_suite() else rootfs.root_of(suite, self._progress, mark)
        self._progress(f"files in {self.dir}")
        directories.make_directories(layout, shape)
        if root:
            namespace.prepare(layout, root)
        release, user = slurm_release(root), choose_slurm_user(self._progress)
        state = State(suite, release, shape, accounting, ports, user, plain)
        layout.write_state(state)
        directories.give_to_slurm_user(layout, state)
        directories.write_configuration(layout, state)
        self._progress("emulated GPUs")
        build_library(layout.lib)
        if accounting:
            self._progress("mariadb: data directory")
            database.prepare(layout, state.slurm_user)
        self._daemons = {}
        self._start_daemons(list(self.daemons().values()))
        layout.mark_ready(state)
        parts = "" if plain else f" x {shape.shards} shards"
        self._progress(f"ready: Slurm {state.release}, {shape.nodes} nodes x {shape.gpus} GPUs{parts}")

    def _start_daemons(self, daemons: list[Background]) -> None:
        nodes = [daemon for daemon in daemons if daemon.name.startswith(SLURMD)]
        for daemon in daemons:
            if daemon in nodes:
                continue
            self._progress(daemon.name)
            daemon.start()
            daemon.wait_ready()
            if daemon.name == "slurmdbd":
                self._make_accounts()
        self._progress(f"{len(nodes)} slurmd")
        for daemon in nodes:
            daemon.start()
        for daemon in nodes:
            daemon.wait_ready()

    def _make_accounts(self) -> None:
        self._progress("accounts")
        accounts = self.layout.run / "accounts.cfg"
        accounts.write_text(configuration.accounts())
        self.run(["sacctmgr", "-i", "load", f"file={accounts}"])

    def _recorded(self) -> dict[str, int]:
        pid_files = self.layout.run.glob("*.pid")
        return {file.stem: pid for file in pid_files if (pid := recorded_pid(file)) is not None}

    def _stop_everything(self) -> None:
        """slurmctld first, so that it does not see the rest as failures; then jobs; munge and the database last."""
        daemons = self._recorded()
        nodes = [pid for name, pid in daemons.items() if name.startswith(SLURMD)]
        jobs = with_descendants([*marked_pids(self.dir), *nodes]) - set(daemons.values())
        stop_pids([daemons[name] for name in ("slurmctld",) if name in daemons], grace_s=10)
        stop_pids(nodes)
        stop_pids(jobs, grace_s=0.5)
        stop_pids([daemons[name] for name in ("slurmdbd",) if name in daemons], grace_s=10)
        stop_pids([*daemons.values(), *marked_pids(self.dir)])
        for file in self.layout.run.glob("*.pid"):
            file.unlink()
        self.layout.state_file.unlink(missing_ok=True)
        self._daemons = {}

    # -- use ------------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        *,
        user: str | None = None,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside the testbed and return its output; `check` turns failure into an error."""
        argv, full_env = self.command(command, user=user)
        try:
            done = subprocess.run(
                argv,
                env={**full_env, **(env or {})},
                cwd=cwd or self.layout.home,
                input="" if input is None else input,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as why:
            raise GpushareError(f"{' '.join(command)}: no answer after {timeout_s:g} s") from why
        except OSError as why:
            raise GpushareError(f"{' '.join(command)}: {why.strerror}") from why
        if check and done.returncode:
            raise GpushareError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done

    def command(self, command: Sequence[str], *, user: str | None = None) -> tuple[list[str], dict[str, str]]:
        """The argv and whole environment that run `command` inside the testbed."""
        return user_command(self.layout, command, user, self._enter(self.state))

    def _enter(self, state: State) -> list[str]:
        return [] if state.suite == rootfs.host_suite() else namespace.enter_argv(self.layout)

    def _ask(self, command: Sequence[str]) -> str:
        done = self.run(command, check=False)
        return "" if done.returncode else done.stdout

    # -- change it, for tests -------------------------------------------------------------------

    def restart(self, name: str) -> None:
        """Stop a daemon (``slurmctld``, ``slurmdbd``, ``slurmd-gpu0``, ...) if it runs, and start it."""
        daemon = self._daemon(name)
        daemon.stop()
        daemon.start()
        daemon.wait_ready()

    def stop(self, name: str) -> None:
        self._daemon(name).stop()

    def kill(self, name: str) -> None:
        """SIGKILL, as in a crash."""
        self._daemon(name).kill()

    def reconfigure(self) -> None:
        self.run(["scontrol", "reconfigure"])

    def configure(self, slurm: dict[str, str] | None = None, gpushare: dict[str, str] | None = None) -> None:
        """Set keys of slurm.conf and gpushare.conf; an empty value removes one. A reset undoes it.

        slurmctld is restarted for slurm.conf; the hook notices another gpushare.conf itself.
        """
        for path, changes in ((self.layout.slurm_conf, slurm), (self.layout.gpushare_conf, gpushare)):
            if changes:
                path.write_text(configuration.with_keys(path.read_text(), changes))
        if slurm:
            self.restart("slurmctld")
        elif gpushare:
            self.wait_for_hook()

    def wait_for_hook(self) -> None:
        """Until the hook has looked at gpushare.conf again, as it does once a second."""
        changed_at = int(time.time())
        wait_until(lambda: int(time.time()) > changed_at, 2)

    def _daemon(self, name: str) -> Background:
        daemons = self.daemons()
        if name not in daemons:
            raise BadInput(f"testbed: no daemon '{name}'", f"There are: {', '.join(daemons)}.")
        return daemons[name]

    # -- the directory --------------------------------------------------------------------------

    def _refuse_or_clean(self) -> None:
        if not any(self.dir.iterdir()):
            return
        self._require_ours()
        state = self.layout.read_state()
        if state and state.ready and all(self.running().values()):
            raise GpushareError(
                f"{self.dir}: a testbed runs here already",
                f"Stop it with 'gpushare-lab testbed down --dir {self.dir}'.",
            )
        self._progress("cleaning up what an earlier testbed left")
        self._stop_everything()
        self._remove_directory()
        self.dir.mkdir(mode=0o755, exist_ok=True)

    def _require_ours(self) -> None:
        if any(self.dir.iterdir()) and not self.layout.is_claimed():
            raise BadInput(f"{self.dir}: not a testbed's directory", "Nothing was changed. Choose another --dir.")

    def _remove_directory(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One `up` or `down` a directory at a time; the lock is on the directory, so that nothing stays behind."""
        try:
            self.dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.layout.check_owner()
            lock = os.open(self.dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as why:
            raise GpushareError(f"testbed: {self.dir}: {why.strerror}") from why
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise GpushareError(f"{self.dir}: another 'up' or 'down' is at work here") from None
        finally:
            os.close(lock)
