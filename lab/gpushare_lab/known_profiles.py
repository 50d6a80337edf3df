"""Profiles that no run of ours was measured for: set up for an experiment, a bench or a test."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from slurm_gpushare.store import Store, schema
from slurm_gpushare.store.database import insert_many
from slurm_gpushare.store.workloads import claim, touch


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """What is known of a token without a run of ours."""

    token: str
    owner_uid: int
    gpu_model: str
    mem_used_mib: int
    mem_total_mib: int
    cluster: int
    duration_s: float | None = None
    features: Mapping[str, float] = field(default_factory=dict)


def enter_profiles(store: Store, profiles: Collection[KnownProfile]) -> None:
    """Write profiles with their clusters in one transaction, in place of earlier ones of the same token and GPU."""
    rows = []
    for profile in profiles:
        row = asdict(profile) | {"features": json.dumps(dict(profile.features), separators=(",", ":"), allow_nan=False)}
        del row["owner_uid"]
        rows.append(row | {"generation": 1, "runs": 1, "scatter": "{}", "needs_cluster": 0,
                           "updated_s": int(time.time())})  # fmt: skip
    with store.database.write() as connection:
        claim(connection, {profile.token: profile.owner_uid for profile in profiles})
        insert_many(connection, schema.profile, rows, replace=True)
        touch(connection, [profile.token for profile in profiles])
