"""A throw-away Slurm on one machine: bring it up, use it, change it, take it down."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from slurm_gpushare.errors import BadInput, GpushareError
from slurm_gpushare.testbed import confs, database, namespace, rootfs
from slurm_gpushare.testbed.daemons import Daemon, marked_pids, recorded_pid, stop_pids
from slurm_gpushare.testbed.emulator import build_library, create_node
from slurm_gpushare.testbed.environment import command_env, daemon_env, user_command
from slurm_gpushare.testbed.layout import Layout, Shape, State, default_dir
from slurm_gpushare.testbed.ports import pick_ports
from slurm_gpushare.testbed.scripts import write_scripts

Progress = Callable[[str], None]


def _silent(_: str) -> None: ...


class Testbed:
    """One testbed, known by its directory; any process may make this object for a testbed that runs."""

    __test__ = False  # pytest: not a test class

    def __init__(self, directory: Path | None = None, progress: Progress = _silent) -> None:
        self.layout = Layout((directory or default_dir()).absolute())
        self._progress = progress
        self._daemons: dict[str, Daemon] = {}

    # -- what it is -----------------------------------------------------------------------------

    @property
    def dir(self) -> Path:
        return self.layout.root

    @property
    def state(self) -> State:
        state = self.layout.read_state()
        if state is None:
            raise GpushareError(f"{self.dir}: no testbed here", "Start one with 'gpushare testbed up'.")
        return state

    @property
    def release(self) -> str:
        """Slurm's version, as ``sinfo -V`` prints it."""
        return self.state.release

    @property
    def shape(self) -> Shape:
        return self.state.shape

    @property
    def env(self) -> dict[str, str]:
        """Environment for commands that talk to this Slurm, on top of this process's own."""
        return command_env(self.layout)

    def daemons(self) -> dict[str, Daemon]:
        """Every daemon by name, in the order in which they start."""
        if not self._daemons:
            self._daemons = {daemon.name: daemon for daemon in self._make_daemons(self.state)}
        return self._daemons

    def running(self) -> dict[str, int | None]:
        """Name of each daemon and its pid, None where it is dead."""
        return {name: daemon.pid() for name, daemon in self.daemons().items()}

    # -- up and down ----------------------------------------------------------------------------

    def up(self, shape: Shape | None = None, *, accounting: bool = True, suite: str | None = None) -> Testbed:
        """Start everything, or raise and leave nothing behind."""
        suite = rootfs.check_suite(suite or rootfs.host_suite())
        shape = shape or Shape()
        self.layout.check()
        if os.geteuid():
            raise GpushareError("testbed: only root can run several users' jobs and make device files", "Use sudo.")
        with self._lock():
            self._refuse_or_clean()
            try:
                self._start(shape, accounting, suite)
            except BaseException:
                self._stop_everything()
                self._remove_directory()
                raise
        return self

    def down(self, *, purge: bool = False) -> None:
        """Stop every process of this testbed; `purge` removes its directory too."""
        if not self.dir.exists():
            return
        self._require_ours()
        with self._lock():
            self._stop_everything()
            self.layout.state_file.unlink(missing_ok=True)
            if purge:
                self._remove_directory()

    def _start(self, shape: Shape, accounting: bool, suite: str) -> None:
        root = None if suite == rootfs.host_suite() else rootfs.root_of(suite, self._progress)
        self._progress(f"files in {self.dir}")
        self._make_directories(shape)
        if root:
            namespace.prepare(self.layout, root)
        state = State(suite, _slurm_release(root), shape, accounting, pick_ports(shape.nodes))
        self.layout.write_state(state)
        self._write_configuration(state)
        self._progress("emulated GPUs")
        build_library(self.layout.lib)
        if accounting:
            self._progress("mariadb: data directory")
            database.prepare(self.layout)
        self._daemons = {}
        for daemon in self.daemons().values():
            self._progress(daemon.name)
            daemon.start()
            if not daemon.name.startswith("slurmd-"):
                daemon.wait_ready()
            if daemon.name == "slurmdbd":
                self._progress("accounts")
                self._make_accounts()
        self._progress("nodes")
        for name in shape.node_names:
            self.daemons()[f"slurmd-{name}"].wait_ready()
        self.layout.mark_ready(state)
        self._progress(f"ready: Slurm {state.release}, {shape.nodes} nodes x {shape.gpus} GPUs x {shape.shards} shards")

    def _make_directories(self, shape: Shape) -> None:
        layout = self.layout
        try:
            for path in (layout.etc, layout.log, layout.run, layout.spool / "slurmctld", layout.bin, layout.lib):
                path.mkdir(parents=True, mode=0o755)
            layout.home.mkdir()
            layout.home.chmod(0o1777)
            self.make_gpushare_directories()
            for node in shape.node_names:
                (layout.spool / node).mkdir()
                (layout.dev / node).mkdir(parents=True)
                for index in range(shape.gpus):
                    os.mknod(layout.dev / node / f"nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
            self.clean_emulation(shape)
            key = layout.etc / "munge.key"
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))
        except OSError as why:
            raise GpushareError(f"testbed: {why.filename or self.dir}: {why.strerror}") from why

    def make_gpushare_directories(self) -> None:
        """The places that gpushare.conf names."""
        for name in ("state", "spool/incoming"):
            (self.layout.gpushare / name).mkdir(parents=True, exist_ok=True)
        (self.layout.gpushare / "spool" / "incoming").chmod(0o1777)  # users' records come in here too

    def clean_emulation(self, shape: Shape | None = None) -> None:
        """Idle GPUs, as new; in place, since a sampler may have a card mapped."""
        shape = shape or self.shape
        for node in shape.node_names:
            create_node(self.layout.emu, node, shape.gpus)

    def _write_configuration(self, state: State) -> None:
        layout = self.layout
        write_scripts(layout, daemon_env(layout))
        has_cli_filter = (layout.etc / "cli_filter.lua").exists()
        layout.slurm_conf.write_text(confs.slurm_conf(layout, state, _hostname(), has_cli_filter))
        (layout.etc / "gres.conf").write_text(confs.gres_conf(layout, state))
        (layout.etc / "cgroup.conf").write_text(confs.cgroup_conf(state.release))
        layout.gpushare_conf.write_text(confs.gpushare_conf(layout, state))
        if state.accounting:
            slurmdbd = layout.etc / "slurmdbd.conf"
            slurmdbd.touch(mode=0o600)  # slurmdbd refuses one that others may read
            slurmdbd.write_text(confs.slurmdbd_conf(layout, state))
        shutil.copytree(layout.etc, layout.etc_pristine)

    def _make_daemons(self, state: State) -> Iterator[Daemon]:
        layout = self.layout
        env = {**os.environ, **daemon_env(layout)}

        enter = self._enter(state)

        def daemon(name: str, argv: Sequence[str], ready: Callable[[], bool]) -> Daemon:
            # What Slurm's daemons log before they have read their LogFile's name is only on stderr.
            return Daemon(name, argv, env, layout.run, layout.log / f"{name}.err", ready)

        munge = [
            "munged",
            "--foreground",
            f"--key-file={layout.etc}/munge.key",
            f"--socket={layout.munge_socket}",
            f"--pid-file={layout.run}/munged.own.pid",
            f"--log-file={layout.log}/munged.log",
            f"--seed-file={layout.run}/munged.seed",
            "--num-threads=2",
        ]
        if enter:
            yield daemon(namespace.HOLDER, namespace.holder_argv(layout), namespace.ready_file(layout).exists)
        yield daemon("munged", munge, lambda: _unix_answers(layout.munge_socket))
        if state.accounting:
            yield daemon("mariadbd", database.server_argv(layout), lambda: database.answers(layout))
            yield daemon("slurmdbd", [*enter, "slurmdbd", "-D"], lambda: _tcp_answers(state.ports.slurmdbd))
        yield daemon("slurmctld", [*enter, "slurmctld", "-D", "-i"], self._controller_answers)
        for node in state.shape.node_names:
            yield daemon(f"slurmd-{node}", [*enter, "slurmd", "-D", "-N", node], partial(self._node_is_up, node))

    def _stop_everything(self) -> None:
        pid_files = sorted(self.layout.run.glob("*.pid")) if self.layout.run.exists() else []
        pids = {file.stem: pid for file in pid_files if (pid := recorded_pid(file)) is not None}
        # Job steps first: once their slurmd is gone nobody would tell them to end.
        for group in (
            [pid for name, pid in pids.items() if name.startswith("slurmd-")],
            set(marked_pids(self.dir)) - set(pids.values()),
            [pids[name] for name in ("slurmctld",) if name in pids],
            [pids[name] for name in ("slurmdbd",) if name in pids],
            pids.values(),
            marked_pids(self.dir),
        ):
            stop_pids(group)
        for file in pid_files:
            file.unlink(missing_ok=True)
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
        done = subprocess.run(
            argv,
            env={**full_env, **(env or {})},
            cwd=cwd or self.layout.home,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise GpushareError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done

    def command(self, command: Sequence[str], *, user: str | None = None) -> tuple[list[str], dict[str, str]]:
        """The argv and whole environment that run `command` inside the testbed."""
        return user_command(self.layout, command, user, self._enter(self.state))

    def _enter(self, state: State) -> list[str]:
        return [] if state.suite == rootfs.host_suite() else namespace.enter_argv(self.layout)

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
        """SIGKILL, as a crash would be."""
        self._daemon(name).kill()

    def reconfigure(self) -> None:
        self.run(["scontrol", "reconfigure"])

    def configure(self, slurm: dict[str, str] | None = None, gpushare: dict[str, str] | None = None) -> None:
        """Set keys of slurm.conf and gpushare.conf; an empty value removes one. A reset undoes it.

        slurmctld is restarted if slurm.conf changed or the hook has to read gpushare.conf again.
        """
        for path, changes in ((self.layout.slurm_conf, slurm), (self.layout.gpushare_conf, gpushare)):
            if changes:
                path.write_text(confs.with_keys(path.read_text(), changes))
        self.restart("slurmctld")

    def _daemon(self, name: str) -> Daemon:
        daemons = self.daemons()
        if name not in daemons:
            raise BadInput(f"testbed: no daemon '{name}'", f"There are: {', '.join(daemons)}.")
        return daemons[name]

    # -- details --------------------------------------------------------------------------------

    def _make_accounts(self) -> None:
        accounts = self.layout.run / "accounts.cfg"
        accounts.write_text(confs.accounts())
        self.run(["sacctmgr", "-i", "load", f"file={accounts}"])

    def _controller_answers(self) -> bool:
        return _tcp_answers(self.state.ports.slurmctld) and self.run(["scontrol", "ping"], check=False).returncode == 0

    def _node_is_up(self, node: str) -> bool:
        answer = self.run(["sinfo", "-h", "-n", node, "-o", "%T"], check=False).stdout.split()
        return bool(answer) and all(word in {"idle", "mixed", "allocated"} for word in answer)

    def _refuse_or_clean(self) -> None:
        if not self.dir.exists() or not any(self.dir.iterdir()):
            return
        self._require_ours()
        state = self.layout.read_state()
        if state and state.ready and all(self.running().values()):
            raise GpushareError(f"{self.dir}: a testbed runs here already", "Stop it with 'gpushare testbed down'.")
        self._progress("cleaning up what an earlier testbed left")
        self._stop_everything()
        self._remove_directory()

    def _require_ours(self) -> None:
        if not self.layout.run.is_dir() or not self.layout.etc.is_dir():
            raise BadInput(f"{self.dir}: not a testbed's directory", "Nothing was changed.")

    def _remove_directory(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One `up` or `down` a directory at a time."""
        self.layout.lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self.layout.lock_file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpushareError(f"{self.dir}: another 'up' or 'down' is at work here") from None
            yield


def _slurm_release(root: Path | None) -> str:
    argv = ["slurmctld", "-V"] if root is None else ["chroot", str(root), "slurmctld", "-V"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]
    except (OSError, subprocess.CalledProcessError) as why:
        raise GpushareError(f"testbed: no slurmctld: {why}", "Run scripts/setup.sh.") from why


def _hostname() -> str:
    return socket.gethostname().partition(".")[0]


def _tcp_answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _unix_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
