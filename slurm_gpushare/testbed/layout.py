"""What a testbed is made of: its shape, its directory, and the state file that survives the process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_gpushare.errors import BadInput, GpushareError

DEFAULT_DIR = Path("/tmp/gpushare-testbed")
GPU_MODEL = "v100"
MARKER = "GPUSHARE_TESTBED"  # in the environment of every process of a testbed; its value is the directory
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

    def __post_init__(self) -> None:
        for name, number, most in (("nodes", self.nodes, 64), ("gpus", self.gpus, 16), ("shards", self.shards, 64)):
            if not 1 <= number <= most:
                raise BadInput(f"testbed: {number} {name}: must be from 1 to {most}")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"gpu{index}" for index in range(self.nodes))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(f"{GPU_MODEL}_{index}" for index in range(self.gpus))


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
    ready: bool = False


@dataclass(frozen=True)
class Layout:
    """The paths inside a testbed's directory."""

    root: Path

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def etc_pristine(self) -> Path:
        """Copy of etc/ as `up` wrote it: what a reset goes back to."""
        return self.root / "etc.pristine"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def emu(self) -> Path:
        return self.root / "emu"

    @property
    def dev(self) -> Path:
        return self.root / "dev"

    @property
    def home(self) -> Path:
        """Homes of the users of `run --user`, and the default working directory."""
        return self.root / "home"

    @property
    def gpushare(self) -> Path:
        return self.root / "gpushare"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def gpushare_conf(self) -> Path:
        return self.etc / "gpushare.conf"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.sock"

    @property
    def mariadb_socket(self) -> Path:
        return self.run / "mariadb.sock"

    @property
    def state_file(self) -> Path:
        return self.run / "state.json"

    @property
    def claim_file(self) -> Path:
        """First file to be written: from then on the directory is a testbed's, and may be emptied."""
        return self.root / ".testbed"

    def check(self) -> None:
        """Refuse a directory that cannot work before anything is written."""
        if not self.root.is_absolute():
            raise BadInput(f"{self.root}: the testbed's directory must be an absolute path")
        if len(os.fsencode(self.mariadb_socket)) > _LONGEST_SOCKET_PATH:
            raise BadInput(f"{self.root}: too long for Unix sockets", "Choose a shorter --dir.")
        if any(character in str(self.root) for character in " \t\n\"'%,#[]:\\$`;&|<>()*?="):
            raise BadInput(f"{self.root}: Slurm's files cannot hold this name", "Choose a plain --dir.")

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
                f"{self.state_file}: not the state of a testbed: {why}", f"Run: gpushare testbed down --dir {self.root}"
            ) from why

    def write_state(self, state: State) -> State:
        draft = self.state_file.with_suffix(".new")
        draft.write_text(json.dumps(asdict(state), indent=1) + "\n")
        draft.rename(self.state_file)
        return state

    def mark_ready(self, state: State) -> State:
        return self.write_state(replace(state, ready=True))
