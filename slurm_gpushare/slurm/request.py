"""The one way to change a pending job's GPU that works on every release."""

from __future__ import annotations

from slurm_gpushare.slurm.gres import Gres, parse_gres, typed_shards
from slurm_gpushare.slurm.release import Release


def retarget(current: str, wanted: str, release: Release) -> str | None:
    """The ``Gres=`` value that turns the request `current` (tres_per_node) into `wanted`; None: this Slurm cannot.

    Where a typed shard request moves to another type, the old type is set to zero beside the new one. 22.05 can
    only change how many shards of the same type are wanted: it accepts another type, but when such a job ends
    it takes a shard of the old type for used for ever, and nothing more fits that card.
    """
    new = parse_gres(wanted)
    if not new:
        return None
    old = [gres for gres in parse_gres(current) if gres.count]
    if list(new) == old:
        return ",".join(map(str, new))
    if not release.gpu_becomes_shard:
        before, after = typed_shards(current), typed_shards(wanted)
        if before is None or after is None or before.type != after.type:
            return None
    kept = {(gres.name, gres.type) for gres in new}
    zeroed = [Gres(gres.name, gres.type, 0) for gres in old if gres.type and (gres.name, gres.type) not in kept]
    if any(gres.name != new[0].name for gres in zeroed):
        zeroed = []  # gpu to shard or back replaces the request as a whole, where it is possible at all
    return ",".join(map(str, [*zeroed, *new]))
