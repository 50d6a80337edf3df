"""What sharing did in a period: accounted jobs and what is known of them in, one `Report` out. Pure arithmetic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_gpushare.protocol.history import Span, by_own_id, isd_of_rate
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.report.job_figures import (
    CpuSummary,
    Distribution,
    gpu_s,
    measured,
    rates_of,
    saved_s,
    span_s,
    spread,
    summarise_cpus,
    weighted_mean,
)
from slurm_gpushare.report.job_view import ROLES, History, JobView, views_of
from slurm_gpushare.slurm.accounting import AccountedJob


@dataclass(frozen=True, slots=True)
class PairLine:
    """All spans of one kind of pair: a resident of one cluster, a guest of another."""

    resident_cluster: int | None
    guest_cluster: int | None
    spans: int
    measured_spans: int
    """For the others what was expected counts."""
    hours: float
    resident_isd_pct: float | None
    guest_isd_pct: float | None
    ps_pct: float | None


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """One user's share of it."""

    user: str
    jobs: int
    shared: int
    gpu_hours_saved: float
    measured: int
    isd_mean_pct: float | None
    """Of those that were measured."""


@dataclass(frozen=True, slots=True)
class Report:
    """What sharing did between `start_s` and `end_s`."""

    start_s: float
    end_s: float
    jobs: tuple[JobView, ...]
    spans: tuple[Span, ...]
    profiled: int
    shared: int
    complete: bool
    """Whether it is known who shared; if not, no figure about sharing is."""
    busy_gpu_h: float
    """GPU hours that the jobs which shared kept cards busy."""
    solo_gpu_h: float
    """GPU hours that the same jobs would have needed alone."""
    measured_spans: int
    isd_pct: Distribution
    """Measured, over jobs whose every span was measured."""
    expected_isd_pct: Distribution
    """Expected, over the jobs that shared and were not measured."""
    prediction_error_points: float | None
    """Mean distance of predicted from measured ISD, over jobs that have both."""
    predictions: int
    waits_s: Mapping[str, Distribution]
    forecast_error_s: Distribution
    """How far from the first forecast jobs started that had been told one."""
    gpu_busy_pct: float | None
    """How busy the jobs that shared keep a GPU, by time, as measured of each job alone."""
    energy_kwh: float | None
    """Power of the card times GPU time, over the jobs whose power was measured."""
    measured_jobs: int
    """Jobs with telemetry."""
    given_back_s: float
    """Added to time limits for what sharing cost, in all."""
    given_back_jobs: int
    paused_s: float
    """Time that jobs were paused, so that their neighbours got the speed they were promised."""
    pauses: int
    out_of_memory: int
    """Jobs that failed while they and their neighbours filled a card."""
    pairs: tuple[PairLine, ...]
    owners: tuple[OwnerLine, ...]
    cpus: CpuSummary
    gpus: Mapping[int, float | None]
    """GPUs that each job had on average while it ran, by SLURM_JOB_ID; None: not known."""

    @property
    def gpu_h(self) -> float:
        """GPU hours of all jobs as they were: of a card that two have, half is counted for each."""
        return sum((self.gpus[job.raw_id] or 0.0) * (job.elapsed_s or 0.0) for job in self.jobs) / 3600

    @property
    def accounted_gpu_h(self) -> float:
        """The same as accounting has them: no ``gres/gpu`` of a job that shares, and so none of its hours."""
        return sum(job.accounted.gpus * (job.elapsed_s or 0.0) for job in self.jobs if job.accounted) / 3600

    @property
    def saved_gpu_h(self) -> float:
        return self.solo_gpu_h - self.busy_gpu_h

    @property
    def ps_pct(self) -> float | None:
        return None if not self.solo_gpu_h else 100 * self.saved_gpu_h / self.solo_gpu_h

    @property
    def gpu_busy_shared_pct(self) -> float | None:
        """The same work in the GPU time that it took: what the cards were busy with sharing."""
        if self.gpu_busy_pct is None or self.busy_gpu_h <= 0:
            return None
        return min(self.gpu_busy_pct * self.solo_gpu_h / self.busy_gpu_h, 100.0)

    @property
    def blind(self) -> int:
        """Jobs that shared cards which tell nothing of single jobs."""
        return sum(job.blind and bool(job.stays) for job in self.jobs)

    @property
    def past_promise(self) -> tuple[JobView, ...]:
        return tuple(job for job in self.jobs if job.past_promise)


def summarise(
    accounted: Iterable[AccountedJob], known: History, promise: SitePromises, start_s: float, end_s: float,
    shards_per_gpu: int = 2,
) -> Report:  # fmt: skip
    """The report of a period. A span counts for those of its two jobs that are among `accounted`, half for each."""
    jobs = views_of(accounted, known, promise, end_s)
    by_id = {job.raw_id: job for job in jobs}
    kept = tuple(_of_last_runs(known.spans, by_id))
    shared = [job for job in jobs if job.stays]
    saved = _saved_by_job_s(kept, by_id, end_s)
    busy_s = sum(job.gpu_s for job in shared)
    both = ((job.measured_isd_pct, job.expected_isd_pct) for job in shared)
    errors = [abs(seen - expected) for seen, expected in both if seen is not None and expected is not None]
    given_s = [job.given_back_s for job in jobs if job.given_back_s]
    energy_kwh = [job.energy_kwh for job in jobs if job.energy_kwh is not None]
    decided = by_own_id(known.decisions, {job.key: job.raw_id for job in jobs})
    done = Counter(decision.kind for decision in decided if decision.job_id in by_id)
    unmeasured = (job.expected_isd_pct for job in shared if job.measured_isd_pct is None)
    return Report(
        start_s=start_s,
        end_s=end_s,
        jobs=jobs,
        spans=kept,
        profiled=sum(job.probe for job in jobs),
        shared=len(shared),
        complete=known.complete,
        busy_gpu_h=busy_s / 3600,
        solo_gpu_h=(busy_s + sum(saved.values())) / 3600,
        measured_spans=sum(map(measured, kept)),
        isd_pct=spread(job.measured_isd_pct for job in shared if job.measured_isd_pct is not None),
        expected_isd_pct=spread(value for value in unmeasured if value is not None),
        prediction_error_points=spread(errors).mean,
        predictions=len(errors),
        waits_s={
            role: spread(job.wait_s for job in jobs if job.role == role and job.wait_s is not None) for role in ROLES
        },
        forecast_error_s=spread(job.forecast_error_s for job in jobs if job.forecast_error_s is not None),
        gpu_busy_pct=weighted_mean((job.run.gpu_busy_pct, job.elapsed_s or 0.0) for job in shared if job.run),
        energy_kwh=sum(energy_kwh) if energy_kwh else None,
        measured_jobs=sum(job.run is not None for job in jobs),
        given_back_s=sum(given_s),
        given_back_jobs=len(given_s),
        paused_s=sum(job.paused_s for job in jobs),
        pauses=done["paused"],
        out_of_memory=done["out-of-memory"],
        pairs=_pair_lines(kept, by_id, end_s),
        owners=_owner_lines(jobs, saved),
        cpus=summarise_cpus(jobs),
        gpus={job.raw_id: job.gpus_held(shards_per_gpu) for job in jobs},
    )


def _in_last_run(span: Span, job: JobView | None) -> bool:
    return job is not None and job.start_s is not None and span.start_s >= job.start_s


def _of_last_runs(spans: Iterable[Span], jobs: Mapping[int, JobView]) -> Iterator[Span]:
    """The spans of the last runs of these jobs, over when accounting says that one of the two is."""
    for span in spans:
        both = [job for job in map(jobs.get, (span.resident_job, span.guest_job)) if _in_last_run(span, job)]
        ends_s = [job.end_s for job in both if job and job.end_s is not None]
        if both:
            over_s = min(ends_s, default=None) if span.end_s is None else span.end_s
            yield replace(span, end_s=None if over_s is None else max(over_s, span.start_s))


def _saved_by_job_s(spans: Iterable[Span], jobs: Mapping[int, JobView], now_s: float) -> dict[int, float]:
    """GPU time saved by each job: half of what its spans saved."""
    saved: dict[int, float] = defaultdict(float)
    for span in spans:
        for job in (span.resident_job, span.guest_job):
            if _in_last_run(span, jobs.get(job)):
                saved[job] += saved_s(span, now_s) / 2
    return saved


def _pair_lines(spans: Iterable[Span], jobs: Mapping[int, JobView], now_s: float) -> tuple[PairLine, ...]:
    """A line for each pair of clusters; those of jobs outside the report are unknown, and first."""
    clusters = {raw_id: job.cluster for raw_id, job in jobs.items()}
    groups: dict[tuple[int | None, int | None], list[Span]] = defaultdict(list)
    for span in spans:
        groups[clusters.get(span.resident_job), clusters.get(span.guest_job)].append(span)
    ordered = sorted(groups.items(), key=lambda group: tuple(-1 if c is None else c for c in group[0]))
    return tuple(_pair_line(kind, members, now_s) for kind, members in ordered)


def _pair_line(kind: tuple[int | None, int | None], spans: Sequence[Span], now_s: float) -> PairLine:
    known = [span for span in spans if None not in rates_of(span)]
    busy_s = sum(gpu_s(span, now_s) for span in known)
    work_s = busy_s + sum(saved_s(span, now_s) for span in known)
    isd = [tuple(isd_of_rate(rate) for rate in rates_of(span)) for span in known]
    return PairLine(
        *kind,
        spans=len(spans),
        measured_spans=sum(map(measured, spans)),
        hours=sum(span_s(span, now_s) for span in spans) / 3600,
        resident_isd_pct=spread(resident for resident, _ in isd if resident is not None).mean,
        guest_isd_pct=spread(guest for _, guest in isd if guest is not None).mean,
        ps_pct=100 * (1 - busy_s / work_s) if work_s else None,
    )


def _owner_lines(jobs: Iterable[JobView], saved: Mapping[int, float]) -> tuple[OwnerLine, ...]:
    """A line for each user."""
    groups: dict[str, list[JobView]] = defaultdict(list)
    for job in jobs:
        groups[job.user].append(job)
    lines = []
    for user, own in sorted(groups.items()):
        isd = spread(job.measured_isd_pct for job in own if job.measured_isd_pct is not None)
        saved_h = sum(saved.get(job.raw_id, 0.0) for job in own) / 3600
        lines.append(OwnerLine(user, len(own), sum(bool(job.stays) for job in own), saved_h, isd.count, isd.mean))
    return tuple(lines)
