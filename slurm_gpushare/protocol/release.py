"""Which Slurm this is, and what that means for sharing: the one place that compares releases.

The hook and the task prolog get `CAPABILITIES` as numbers (scripts/make_reference.py).
"""

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
    def number(self) -> int:
        """22.05.8 as 220508: how Lua and shell compare releases."""
        return self.year * 10_000 + self.month * 100 + self.patch

    def can(self, what: str) -> bool:
        """Whether it has one of `CAPABILITIES`."""
        return self >= CAPABILITIES[what]


CAPABILITIES = {
    # A refused change may say why; before, Slurm drops what is said and writes an error into its log.
    "explains_refusals": Release(23, 2),
    # A pending job's gpu:1 may be updated to shards, and untyped shards to typed ones: updates start from an empty list
    # of GRES (read in Slurm's source; tried on 24.11 and 26.05). Before, it has typed shards from the start.
    "gpu_becomes_shard": Release(23, 2, 6),
    # sacctmgr writes an AdminComment as it is given (tried on 24.11); 22.05 writes it in small letters.
    "keeps_small_and_capital": Release(24, 11),
    # Requests are written gres/gpu:1; before, gres:gpu:1.
    "writes_gres_with_slash": Release(23, 11),
    # A node's GresUsed tells the shards in use of each GPU; before, it counts GPUs.
    "counts_shards_per_gpu": Release(23, 11, 2),
    # A whole-GPU job never starts beside a sharer that has lost its neighbour; before, single GPUs must be asked for as
    # all shards of one.
    "keeps_whole_gpus_apart": Release(23, 11, 5),
}
"""What Slurm can do, from which release on."""


def parse_release(version: str) -> Release:
    """From ``slurm-wlm 22.05.8``, ``slurm 24.11.5`` or ``22.05.8``."""
    found = _VERSION.search(version)
    if found is None:
        raise SlurmError(f"'{version.strip()}' is not a Slurm version")
    return Release(int(found[1]), int(found[2]), int(found[3] or 0))


def is_stale(generated: str, release: Release) -> bool:
    """Whether the SlurmVersion that ``configure`` wrote down is another release than the one that runs.

    The hook writes requests as that release understands them, so nothing may be converted before configure
    has run again. A site that never had configure work it out (an empty value) is taken to be recent, as ever.
    """
    if not generated:
        return False
    try:
        return parse_release(generated) != release
    except SlurmError:
        return True
