"""Profiles that are known without a run of ours: brought over from another site, or set up for an experiment."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sqlalchemy import delete

from slurm_gpushare.store import schema
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import claim, touch


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """What is known of a token."""

    token: str
    owner_uid: int
    gpu_model: str
    mem_used_mib: int
    mem_total_mib: int
    cluster: int
    duration_s: float | None = None
    features: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def enter_profiles(store: Store, profiles: Collection[KnownProfile]) -> None:
    """Write profiles with their clusters in one transaction, in place of earlier ones of the same token and GPU."""
    p, now_s = schema.profile, int(time.time())
    with store.database.write() as connection:
        claim(connection, {profile.token: profile.owner_uid for profile in profiles})
        for profile in profiles:
            connection.execute(delete(p).where(p.c.token == profile.token, p.c.gpu_model == profile.gpu_model))
            connection.execute(
                p.insert().values(
                    token=profile.token,
                    gpu_model=profile.gpu_model,
                    generation=1,
                    runs=1,
                    mem_used_mib=profile.mem_used_mib,
                    mem_total_mib=profile.mem_total_mib,
                    duration_s=profile.duration_s,
                    features=json.dumps(dict(profile.features), separators=(",", ":"), allow_nan=False),
                    scatter="{}",
                    cluster=profile.cluster,
                    needs_cluster=0,
                    updated_s=now_s,
                )
            )
        touch(connection, [profile.token for profile in profiles])
