"""The CPUs of a job, from ``scontrol show job -d``."""

from __future__ import annotations

import re

from slurm_gpushare.slurm.array_tasks import expand_tasks
from slurm_gpushare.slurm.hostlist import expand

_PART = re.compile(r"\bNodes=(\S+) CPU_IDs=([\d,-]+)")


def parse_cores(output: str) -> frozenset[tuple[str, int]]:
    """Node and CPU number of each CPU; empty where the job holds none or Slurm does not say."""
    return frozenset(
        (node, cpu) for nodes, cpus in _PART.findall(output) for node in expand(nodes) for cpu in expand_tasks(cpus)
    )
