"""What a site has set up already: asked of Slurm, and read from the files beside slurm.conf."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import GENERATED_SUFFIX
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.accounting import Limit
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node, Partition
from slurm_gpushare.slurm.values import expand, model_of_type

GENERATED = f"gpushare{GENERATED_SUFFIX}"
FILES = ("gpushare.conf", GENERATED, "gres.conf", "cgroup.conf", "job_submit.lua", "cli_filter.lua")


@dataclass(frozen=True, slots=True)
class SiteSetup:
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
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why nodes are down or drained, by name; those of which nobody said why are absent."""
    is_controller: bool = True
    """Whether slurmctld runs on this machine, or may: compute and login nodes need not have all of our files."""

    def words(self, key: str) -> list[str]:
        """A comma list of the configuration, without Slurm's ways to say "none"."""
        return [word for word in values.text(self.config.get(key, "")).split(",") if word]

    def scripts(self, key: str) -> list[str]:
        """What a key such as Prolog names; from 23.11 on there may be several, shown as ``Prolog[0]``."""
        found = (values.text(value) for name, value in self.config.items() if name.partition("[")[0] == key)
        return [path for path in found if path]

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    def gpu_nodes(self, partitions: tuple[str, ...]) -> list[Node]:
        """Nodes with GPUs in any of `partitions`, of whatever model."""
        return [
            node
            for node in self.nodes
            if set(node.partitions) & set(partitions) and any(gres.name == "gpu" for gres in node.gres)
        ]

    def shared_nodes(self, partitions: tuple[str, ...], models: Sequence[str]) -> list[Node]:
        """Those of `gpu_nodes` whose GPUs are all of one of `models`. Other models stay what they are.

        With a single model, GPUs that have no type yet are taken to be of it.
        """
        return [node for nodes in self.nodes_by_model(partitions, models).values() for node in nodes]

    def nodes_by_model(self, partitions: tuple[str, ...], models: Sequence[str]) -> dict[str, list[Node]]:
        """The same by model."""
        types = [(node, gpu_types([node]) or set(models)) for node in self.gpu_nodes(partitions)]
        return {model: [node for node, its in types if its == {model}] for model in models}

    def models_of_nodes(self, partitions: tuple[str, ...], models: Sequence[str]) -> dict[str, tuple[str, int]]:
        """What job_submit.lua and cli_filter.lua must know of each model: its nodes, and how many GPUs they have."""
        return {
            model: (",".join(node.name for node in nodes), max(map(gpu_count, nodes), default=1))
            for model, nodes in self.nodes_by_model(partitions, models).items()
        }


def collect(slurm: Slurm) -> SiteSetup:
    """Ask once. Raises `SlurmError` where slurmctld does not answer; accounting may be absent."""
    config = slurm.config()
    asked_s = time.time()
    etc = Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    try:
        limits: tuple[Limit, ...] | None = tuple(slurm.limits())
    except SlurmError:
        limits = None
    files = {}
    for name in FILES:
        with suppress(OSError):
            files[name] = (etc / name).read_text(encoding="utf-8", errors="replace")
    return SiteSetup(
        release=slurm.release,
        config=config,
        nodes=tuple(slurm.nodes()),
        partitions=tuple(slurm.partitions()),
        limits=limits,
        etc=etc,
        files=files,
        asked_s=asked_s,
        reasons=slurm.node_reasons(),
        is_controller=_is_controller(config),
    )


def _is_controller(config: Mapping[str, str]) -> bool:
    """By name, as in ``SlurmctldHost[0]=ctl(10.0.0.1)``, or by the daemon: Slurm may know a host by another name."""
    hosts = (value.partition("(")[0] for key, value in config.items() if key.partition("[")[0] == "SlurmctldHost")
    if socket.gethostname().partition(".")[0] in {host.partition(".")[0] for host in hosts}:
        return True
    return any(process.info["name"] == "slurmctld" for process in psutil.process_iter(["name"]))


def job_defaults(partition: Partition) -> dict[str, int]:
    """A partition's JobDefaults: {"DefCpuPerGPU": 8, "DefMemPerGPU": 16000}."""
    found = values.tres(partition.fields.get("JobDefaults", ""))
    return {name: int(value) for name, value in found.items() if value.isdecimal()}


def gpu_types(nodes: Iterable[Node]) -> set[str]:
    """The GPU types of `nodes` as users know them: the index of a per-index type is left out."""
    names = {gres.type for node in nodes for gres in node.gres if gres.name == "gpu" and gres.type}
    return {model_of_type(name) for name in names}


def gpu_count(node: Node) -> int:
    return sum(gres.count for gres in node.gres if gres.name == "gpu")


# gres.conf as far as GPUs are concerned: which devices a node has, and whether it looks for them by itself.


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU's device file, and what the site says of it (``Cores=... Links=...``)."""

    file: str
    settings: str = ""


def _lines(gres_conf: str) -> Iterator[dict[str, str]]:
    for line in gres_conf.splitlines():
        yield {key.lower(): value for key, value in values.pairs(line.split("#", 1)[0]).items()}


def devices(gres_conf: str, node: str) -> tuple[Device, ...]:
    """The node's GPUs, in the order of the file."""
    found: list[Device] = []
    for words in _lines(gres_conf):
        names = expand(words["nodename"]) if "nodename" in words else (node,)
        if words.get("name", "").lower() == "gpu" and node in names:
            kept = " ".join(f"{key}={words[key.lower()]}" for key in ("Cores", "Links") if key.lower() in words)
            found += [Device(file, kept) for file in expand(words.get("file", ""))]
    return tuple(found)


def autodetect(gres_conf: str, node: str) -> str:
    """How the node finds its GPUs: what its own lines say, else what the file says for all, else ``off``."""
    general, own = "off", None
    for words in _lines(gres_conf):
        if "autodetect" in words and "nodename" not in words:
            general = words["autodetect"].lower()
        elif "autodetect" in words and node in expand(words["nodename"]):
            own = words["autodetect"].lower()
    return own or general
