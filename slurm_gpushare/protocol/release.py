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

    @property
    def counts_shards_per_gpu(self) -> bool:
        return self >= CAPABILITIES["counts_shards_per_gpu"].since

    @property
    def keeps_small_and_capital(self) -> bool:
        return self >= CAPABILITIES["keeps_small_and_capital"].since

    @property
    def gpu_becomes_shard(self) -> bool:
        return self >= CAPABILITIES["gpu_becomes_shard"].since

    @property
    def keeps_whole_gpus_apart(self) -> bool:
        return self >= CAPABILITIES["keeps_whole_gpus_apart"].since


@dataclass(frozen=True, slots=True)
class Capability:
    """What Slurm can do from a release on."""

    since: Release
    what: str


CAPABILITIES = {
    "gpu_becomes_shard": Capability(
        Release(23, 2, 6),
        "A pending job's gpu:1 may be updated to shards, and untyped shards to typed ones: updates start from an empty "
        "list of GRES (read in Slurm's source; tried on 24.11 and 26.05). Before, it has typed shards from the start.",
    ),
    "keeps_small_and_capital": Capability(
        Release(24, 11),
        "sacctmgr writes an AdminComment as it is given (tried on 24.11); 22.05 writes it in small letters.",
    ),
    "writes_gres_with_slash": Capability(Release(23, 11), "Requests are written gres/gpu:1; before, gres:gpu:1."),
    "counts_shards_per_gpu": Capability(
        Release(23, 11, 2), "A node's GresUsed tells the shards in use of each GPU; before, it counts GPUs."
    ),
    "keeps_whole_gpus_apart": Capability(
        Release(23, 11, 5),
        "A whole-GPU job never starts beside a sharer that has lost its neighbour; before, single GPUs must be asked "
        "for as all shards of one.",
    ),
}


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
