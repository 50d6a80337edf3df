"""Whose decisions these are: a task that waits has its array's id, and gets one of its own when it starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from slurm_gpushare.history import Decision
from slurm_gpushare.slurm.array_tasks import array_of


def by_own_id(decisions: Iterable[Decision], raw_ids: Mapping[str, int]) -> list[Decision]:
    """Each decision under the SLURM_JOB_ID of the job that its key names, as far as `raw_ids` knows the key."""
    found = []
    for decision in decisions:
        own = raw_ids.get(str(decision.reasons.get("key")), decision.job_id)
        found.append(decision if own == decision.job_id else replace(decision, job_id=own))
    return found


def of_job(decisions: Iterable[Decision], raw_id: int, key: str) -> list[Decision]:
    """The decisions about one job, those from before it had its own id among them."""
    mine = {raw_id, array_of(key)}
    own = (d for d in decisions if d.job_id in mine and d.reasons.get("key", key) == key)
    return by_own_id(own, {key: raw_id})
