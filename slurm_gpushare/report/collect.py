"""Ask Slurm and the store for what a report needs: one sacct call, one squeue if jobs still run, three queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from slurm_gpushare.report.page import KnowledgeCells, ProfilePoint
from slurm_gpushare.report.summary import Promise, Report, summarise
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.store.store import Store


@dataclass(frozen=True, slots=True)
class Period:
    """From `start` to `end`, local time."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Filters:
    """As sacct's -u, -A, -p, -M take them; empty does not limit."""

    users: str = ""
    accounts: str = ""
    partitions: str = ""
    clusters: str = ""


def collect(slurm: Slurm, store: Store | None, period: Period, filters: Filters, promise: Promise) -> Report:
    """The report of `period`. Without a store it knows what accounting and the tags tell, and no more."""
    start_s, end_s = period.start.timestamp(), period.end.timestamp()
    query = AccountingQuery(
        start=period.start.strftime("%Y-%m-%dT%H:%M:%S"),
        end=period.end.strftime("%Y-%m-%dT%H:%M:%S"),
        users=filters.users,
        accounts=filters.accounts,
        partitions=filters.partitions,
        clusters=filters.clusters,
    )
    jobs = (job for job in _with_tags(slurm, slurm.accounting(query)) if job.gpus or job.shards or job.tag)
    spans = store.sharing.between(start_s, end_s) if store else ()
    decisions = store.decisions.between(start_s, end_s) if store else ()
    return summarise(jobs, spans, decisions, promise, start_s, end_s)


def _with_tags(slurm: Slurm, jobs: list[AccountedJob]) -> list[AccountedJob]:
    """Accounting gets a job's comment when the job ends: until then its tag is in the queue."""
    if all(job.tag or job.end_s is not None for job in jobs):
        return jobs
    try:
        tags = {job.raw_id: job.tag for job in slurm.jobs() if job.tag}
    except SlurmError:
        return jobs  # a report of the past needs no slurmctld
    return [job if job.tag else replace(job, tag=tags.get(job.raw_id)) for job in jobs]


def profile_points(store: Store) -> list[ProfilePoint]:
    """Every profiled workload, for the picture of the clusters."""
    return [
        ProfilePoint(profile.features["mgup"], profile.features["mgmap"], profile.cluster)
        for profile in store.profiles.all()
        if {"mgup", "mgmap"} <= profile.features.keys()
    ]


def shipped_cells() -> KnowledgeCells:
    """The knowledge that every token starts from, for the heat map. Imports numpy: only for pages."""
    from slurm_gpushare.knowledge.cells import isd_matrix
    from slurm_gpushare.knowledge.default import default_kb

    base = default_kb()
    matrix = isd_matrix(base.cells, base.k)
    return KnowledgeCells(base.gpu_model, [[None if v != v else float(v) for v in row] for row in matrix])
