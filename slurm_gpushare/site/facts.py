"""What a site has set up already: asked of Slurm, and read from the files beside slurm.conf."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.limits import Limit
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.release import Release
from slurm_gpushare.slurm.site import Partition

FILES = ("gres.conf", "cgroup.conf", "job_submit.lua", "cli_filter.lua")


@dataclass(frozen=True, slots=True)
class Facts:
    """A site, as far as sharing is concerned."""

    release: Release
    config: Mapping[str, str]
    """``scontrol show config``; keys as slurm.conf(5) spells them."""
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    limits: tuple[Limit, ...] | None
    """Of QOS and associations; None where accounting does not answer."""
    etc: Path
    """Where slurm.conf is."""
    files: Mapping[str, str]
    """Texts of those of `FILES` that exist and can be read."""
    asked_s: float = 0.0
    """This machine's clock when slurmctld told its own."""

    def words(self, key: str) -> list[str]:
        """A comma list of the configuration, without Slurm's ways to say "none"."""
        return [word for word in values.text(self.config.get(key, "")).split(",") if word]

    def scripts(self, key: str) -> list[str]:
        """What Prolog, Epilog or TaskProlog name; from 23.11 on there may be several, shown as ``Prolog[0]``."""
        found = (values.text(value) for name, value in self.config.items() if name.partition("[")[0] == key)
        return [path for path in found if path]

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    def shared_nodes(self, partitions: tuple[str, ...]) -> list[Node]:
        """Nodes with GPUs in any of `partitions`."""
        return [
            node
            for node in self.nodes
            if set(node.partitions) & set(partitions) and any(gres.name == "gpu" for gres in node.gres)
        ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def collect(slurm: Slurm) -> Facts:
    """Ask once. Raises `SlurmError` where slurmctld does not answer; accounting may be absent."""
    config = slurm.config()
    asked_s = time.time()
    etc = Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    try:
        limits: tuple[Limit, ...] | None = tuple(slurm.limits())
    except SlurmError:
        limits = None
    texts = {name: _read(etc / name) for name in FILES}
    return Facts(
        release=slurm.release,
        config=config,
        nodes=tuple(slurm.nodes()),
        partitions=tuple(slurm.partitions()),
        limits=limits,
        etc=etc,
        files={name: text for name, text in texts.items() if text is not None},
        asked_s=asked_s,
    )


def job_defaults(partition: Partition) -> dict[str, int]:
    """A partition's JobDefaults: {"DefCpuPerGPU": 8, "DefMemPerGPU": 16000}."""
    found = values.tres(partition.fields.get("JobDefaults", ""))
    return {name: int(value) for name, value in found.items() if value.isdecimal()}


def gpu_types(nodes: list[Node]) -> set[str]:
    """The GPU types of `nodes` as users know them: the index of a per-index type is left out."""
    names = {gres.type for node in nodes for gres in node.gres if gres.name == "gpu" and gres.type}
    return {name.rpartition("_")[0] if name.rpartition("_")[2].isdecimal() else name for name in names}


def gpu_count(node: Node) -> int:
    return sum(gres.count for gres in node.gres if gres.name == "gpu")
