"""The plan: which pending job goes to which GPU, and why. A pure function."""

from __future__ import annotations

from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.coschedule.snapshot import LeftToSlurm, Plan, Snapshot
from slurm_gpushare.knowledge.rates import Knowledge


def plan(snapshot: Snapshot, knowledge: Knowledge, settings: PolicySettings) -> Plan:
    """Place pending jobs that opted in; the others only count through their priority."""
    ours = [job for job in snapshot.pending if job.token is not None and job.eligible]
    return Plan(left=tuple(LeftToSlurm(job.job_id, "no place yet") for job in ours))
