"""Ask Slurm and the store for what a report needs: one sacct call, one squeue if jobs still run, three queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.report.page.knowledge import KnowledgeCells, ProfilePoint
from slurm_gpushare.report.sources import Source
from slurm_gpushare.report.summary import Report, summarise
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.interface import Slurm

if TYPE_CHECKING:  # a login node has no database library
    from slurm_gpushare.store.store import Store


@dataclass(frozen=True, slots=True)
class ReportPeriod:
    """From `start` to `end`, local time."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Filters:
    """As sacct's -u, -A, -p, -M take them; empty does not limit."""

    users: str = ""
    accounts: str = ""
    partitions: str = ""
    slurm_clusters: str = ""


def collect(slurm: Slurm, source: Source, period: ReportPeriod, filters: Filters, promise: SitePromises) -> Report:
    """The report of `period`. What `source` does not know is told as unknown."""
    start_s, end_s = period.start.timestamp(), period.end.timestamp()
    start, end = (moment.strftime("%Y-%m-%dT%H:%M:%S") for moment in (period.start, period.end))
    query = AccountingQuery(start=start, end=end, **asdict(filters))
    jobs = (job for job in _with_tags(slurm, slurm.accounting(query)) if job.gpus or job.shards or job.tag)
    return summarise(jobs, source.between(start_s, end_s), promise, start_s, end_s)


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


def known_cells(store: Store | None, site_models: Sequence[str]) -> list[KnowledgeCells]:
    """What clusters do to each other on each of the site's GPU models, for the heat maps: by this site's tokens, where
    the store may be read, and by the knowledge base that they started from. None where numpy is not installed."""
    try:
        from slurm_gpushare.helper.site_knowledge import of_base, of_site
        from slurm_gpushare.knowledge.kb import default_kb
        from slurm_gpushare.store.workloads import models_of
    except ModuleNotFoundError:
        return []
    models = models_of(store.database, site_models).values() if store else ()
    figures = [figure for model in models for figure in of_site(store, model)] if store else [of_base(default_kb())]
    return [
        KnowledgeCells(figure.title, [[None if v != v else float(v) for v in row] for row in figure.isd()])
        for figure in figures
    ]
