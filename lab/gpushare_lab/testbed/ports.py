"""Free TCP ports for a testbed's daemons."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from gpushare_lab.testbed.layout import Ports
from slurm_gpushare.protocol.errors import GpushareError

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


def _claim(port: int) -> socket.socket | None:
    """What keeps other testbeds off `port` while it is open; None if one of them has it.

    A Unix socket without a file: it is the kernel that forgets the name, also if we are killed.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0gpushare-testbed-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


@contextmanager
def free_ports(count: int, candidates: Iterable[int] | None = None) -> Iterator[list[int]]:
    """`count` different free ports that no other testbed takes before the end of the block."""
    if candidates is None:
        # Not from `random` itself: in two processes that seeded it alike it would give both the same.
        candidates = random.SystemRandom().sample(_CANDIDATES, len(_CANDIDATES))
    found: list[int] = []
    with ExitStack() as claims:
        for port in candidates:
            if len(found) == count:
                break
            if (claim := _claim(port)) is not None:
                claims.enter_context(claim)
                found += [port] if is_free(port) else []
        if len(found) < count:
            raise GpushareError(
                f"testbed: {count} free TCP ports are needed, {len(found)} were found", "Stop something."
            )
        yield found


@contextmanager
def claimed_ports(nodes: int) -> Iterator[Ports]:
    """Ports for the daemons of a testbed, who must listen on them before the end of the block."""
    with free_ports(2 + nodes) as (slurmctld, slurmdbd, *slurmd):
        yield Ports(slurmctld=slurmctld, slurmdbd=slurmdbd, slurmd=tuple(slurmd))
