"""Which Slurm this is, and what that means for sharing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_gpushare.protocol.errors import SlurmError

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True, slots=True)
class Release:
    """A release such as 22.05.8."""

    year: int
    month: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.year}.{self.month:02d}.{self.patch}"

    @property
    def counts_shards_per_gpu(self) -> bool:
        """Whether a node's GresUsed tells the shards in use of each GPU; before, it counts GPUs."""
        return self >= Release(23, 11, 2)

    @property
    def gpu_becomes_shard(self) -> bool:
        """Whether a pending job's ``gpu:1`` may be updated to shards; else it must be typed shards from the start.

        From 23.02.6 an update starts from an empty list of GRES (read in Slurm's source; tried on 24.11 and 26.05).
        """
        return self >= Release(23, 2, 6)

    @property
    def keeps_whole_gpus_apart(self) -> bool:
        """Before 23.11.5 a ``gpu:`` job may start beside the survivor of two sharers."""
        return self >= Release(23, 11, 5)


def parse_release(version: str) -> Release:
    """From ``slurm-wlm 22.05.8``, ``slurm 24.11.5`` or ``22.05.8``."""
    found = _VERSION.search(version)
    if found is None:
        raise SlurmError(f"'{version.strip()}' is not a Slurm version")
    return Release(int(found[1]), int(found[2]), int(found[3] or 0))
