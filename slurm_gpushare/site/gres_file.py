"""gres.conf as far as GPUs are concerned: which devices a node has, and whether it looks for them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.hostlist import expand


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
