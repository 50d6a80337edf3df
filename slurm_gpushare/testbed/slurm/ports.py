"""Free TCP ports for a testbed's daemons."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.testbed.slurm.layout import Ports

# Below the kernel's range for outgoing connections (from 32768), so that no client takes a port
# between our look and the daemon's bind; clear of Slurm's 6817-6819 and MariaDB's 3306.
_CANDIDATES = range(20000, 32000)


def is_free(port: int) -> bool:
    """Whether a daemon could listen on `port` now, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int, candidates: Iterable[int] | None = None) -> list[int]:
    """`count` different free ports; in random order, so that two testbeds rarely want the same."""
    if candidates is None:
        candidates = random.sample(_CANDIDATES, len(_CANDIDATES))
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    if len(found) < count:
        raise GpushareError(f"testbed: {count} free TCP ports are needed, {len(found)} were found", "Stop something.")
    return found


def pick_ports(nodes: int) -> Ports:
    slurmctld, slurmdbd, *slurmd = free_ports(2 + nodes)
    return Ports(slurmctld=slurmctld, slurmdbd=slurmdbd, slurmd=tuple(slurmd))
