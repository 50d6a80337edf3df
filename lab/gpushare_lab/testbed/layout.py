"""What a testbed is made of: its shape, its directory, and the state file that survives the process."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpushare_lab.emulator import CARDS
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import replace_text

DEFAULT_DIR = Path("/var/lib/gpushare-testbed")
"""Where only root can make it: a name in /tmp that everybody knows could be somebody else's already."""
GPU_MODEL = "v100"
SLURM_USER = "slurm"  # an ordinary system user, made by Debian's slurm packages
MARKER = "GPUSHARE_TESTBED"  # in the environment of every process of a testbed; its value is the directory
Progress = Callable[[str], None]
"""Is told each step in words."""
_LONGEST_SOCKET_PATH = 107  # sun_path of a Unix socket, less its final NUL


def default_dir() -> Path:
    """``GPUSHARE_TESTBED``, which is set inside a testbed, else one place a machine."""
    return Path(os.environ.get(MARKER) or DEFAULT_DIR)


@dataclass(frozen=True)
class Shape:
    """How much hardware is pretended."""

    nodes: int = 4
    gpus: int = 4
    shards: int = 2
    models: tuple[str, ...] = (GPU_MODEL,)
    """The nodes have these in turn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))  # a list in the state file
        for name, number, most in (("nodes", self.nodes, 64), ("gpus", self.gpus, 16), ("shards", self.shards, 64)):
            if not 1 <= number <= most:
                raise BadInput(f"testbed: {number} {name}: must be from 1 to {most}")
        if not self.models or not set(self.models) <= CARDS.keys():
            raise BadInput(f"testbed: no GPU model {','.join(self.models)}", f"There are: {', '.join(CARDS)}.")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"gpu{index}" for index in range(self.nodes))

    def model_of(self, node: str) -> str:
        """The GPU model of a node."""
        return self.models[self.node_names.index(node) % len(self.models)]

    def nodes_of(self, model: str) -> tuple[str, ...]:
        return tuple(name for name in self.node_names if self.model_of(name) == model)

    def gpu_types(self, node: str) -> tuple[str, ...]:
        return tuple(f"{self.model_of(node)}_{index}" for index in range(self.gpus))


@dataclass(frozen=True)
class Ports:
    """The TCP ports of one testbed."""

    slurmctld: int
    slurmdbd: int
    slurmd: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """What `up` decided, for the commands that come after it."""

    suite: str
    release: str
    shape: Shape
    accounting: bool
    ports: Ports
    slurm_user: str = SLURM_USER
    plain: bool = False
    """Slurm as it is without us: GPUs of one type, no shards, no scripts."""
    ready: bool = False


class Layout:
    """The paths inside a testbed's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.etc = root / "etc"
        self.etc_pristine = root / "etc.pristine"
        """Copy of etc/ as `up` wrote it: what a reset goes back to."""
        self.log = root / "log"
        self.run = root / "run"
        self.slurm_run = self.run / "slurm"
        """Where SlurmUser's daemons write their pid files."""
        self.spool = root / "spool"
        self.bin = root / "bin"
        self.lib = root / "lib"
        self.emu = root / "emu"
        self.dev = root / "dev"
        self.home = root / "home"
        """Homes of the users of `run --user`, and the default working directory."""
        self.gpushare = root / "gpushare"
        """SlurmUser's: the store and the hook's file, and in it the state directory and the spool."""
        self.slurm_conf = self.etc / "slurm.conf"
        self.gpushare_conf = self.etc / "gpushare.conf"
        self.munge_socket = self.run / "munge.sock"
        self.mariadb_socket = self.run / "mariadb.sock"
        self.state_file = self.run / "state.json"
        self.claim_file = root / ".testbed"
        """First file to be written: from then on the directory is a testbed's, and may be emptied."""

    def check(self) -> None:
        """Refuse a directory that cannot work before anything is written."""
        if not self.root.is_absolute():
            raise BadInput(f"{self.root}: the testbed's directory must be an absolute path")
        if len(os.fsencode(self.mariadb_socket)) > _LONGEST_SOCKET_PATH:
            raise BadInput(f"{self.root}: too long for Unix sockets", "Choose a shorter --dir.")
        if any(character in str(self.root) for character in " \t\n\"'%,#[]:\\$`;&|<>()*?="):
            raise BadInput(f"{self.root}: Slurm's files cannot hold this name", "Choose a plain --dir.")
        way = (path for path in (self.root, *self.root.parents) if path.is_dir() and not path.stat().st_mode & 0o001)
        if (closed := next(way, None)) is not None:
            raise BadInput(
                f"{self.root}: {closed} is closed to others, and slurmctld runs as SlurmUser",
                f"Run 'chmod o+x {closed}', or choose another --dir, for instance below /tmp.",
            )

    def check_owner(self) -> None:
        """Refuse a directory that somebody else made or can change: what is in it would run as whoever starts it."""
        try:
            status = self.root.lstat()
        except FileNotFoundError:
            return
        except OSError as why:
            raise GpushareError(f"testbed: {self.root}: {why.strerror}") from why
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
            raise BadInput(
                f"{self.root}: somebody else made it or can write to it", "Nothing was changed. Choose another --dir."
            )

    def claim(self) -> None:
        self.claim_file.touch()
        self.run.mkdir()

    def is_claimed(self) -> bool:
        return self.claim_file.exists() and self.root.stat().st_uid == os.geteuid()

    def read_state(self) -> State | None:
        try:
            raw: dict[str, Any] = json.loads(self.state_file.read_text())
            raw["shape"] = Shape(**raw["shape"])
            ports = raw["ports"]
            raw["ports"] = Ports(ports["slurmctld"], ports["slurmdbd"], tuple(ports["slurmd"]))
            return State(**raw)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as why:
            raise GpushareError(
                f"{self.state_file}: not the state of a testbed: {why}",
                f"Run: gpushare-lab testbed down --dir {self.root}",
            ) from why

    def write_state(self, state: State) -> None:
        replace_text(self.state_file, json.dumps(asdict(state), indent=1) + "\n")

    def mark_ready(self, state: State) -> None:
        self.write_state(replace(state, ready=True))
