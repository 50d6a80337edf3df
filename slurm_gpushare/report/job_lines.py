"""Each job of a period, and what sharing meant for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_gpushare.protocol.history import Span, SpanSide, isd_of_rate
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.report.slow_down import (
    OTHER,
    UNKNOWN,
    UNSHARED,
    gpu_s,
    mean,
    measured,
    paused_s,
    promised_pct,
    rates_of,
    role_of,
    saved_s,
    span_s,
    whole_run_isd_pct,
)
from slurm_gpushare.slurm.accounting import AccountedJob


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job of the period and what sharing meant for it."""

    job: AccountedJob
    role: str
    cluster: int | None
    partners: tuple[int, ...] = ()
    shared_s: float = 0.0
    isd_pct: float | None = None
    """Measured; None if it never shared or nothing was measured."""
    predicted_isd_pct: float | None = None
    promised_pct: float | None = None

    @property
    def wait_s(self) -> int | None:
        start_s = self.job.start_s
        return None if start_s is None else max(start_s - self.job.submit_s, 0)

    @property
    def past_promise(self) -> bool:
        return self.isd_pct is not None and self.promised_pct is not None and self.isd_pct > self.promised_pct


def job_lines(
    jobs: Iterable[AccountedJob], spans: Iterable[Span], promise: SitePromises, now_s: float, complete: bool
) -> tuple[JobLine, ...]:
    """A line for each job; `complete` says whether a job without a span is known not to have shared."""
    sides: dict[int, list[tuple[float, SpanSide]]] = defaultdict(list)
    for span in spans:
        for side in span.sides:
            sides[side.job].append((span_s(span, now_s), side))
    return tuple(_job_line(job, sides.get(job.raw_id, ()), promise, now_s, complete) for job in jobs)


def _job_line(
    job: AccountedJob,
    sides: Sequence[tuple[float, SpanSide]],
    promise: SitePromises,
    now_s: float,
    complete: bool,
) -> JobLine:
    """Of a job with the sides of its spans, each with how long it lasted."""
    cluster = job.tag.cluster if job.tag else None
    if not sides:
        tagged = UNSHARED if complete or (job.tag and job.tag.probe) else UNKNOWN
        return JobLine(job, tagged if job.tag else OTHER, cluster)
    role = role_of(job.tag, any(side.joined for _, side in sides))
    end_s = now_s if job.end_s is None else job.end_s
    elapsed_s = max(end_s - job.start_s, job.elapsed_s) if job.start_s is not None else job.elapsed_s
    still_s = paused_s(job.tag, job.end_s, now_s)
    return JobLine(
        job=job,
        role=role,
        cluster=cluster,
        partners=tuple(dict.fromkeys(side.neighbour for _, side in sides)),
        shared_s=sum(seconds for seconds, _ in sides),
        isd_pct=whole_run_isd_pct(elapsed_s, [(seconds, side.seen) for seconds, side in sides], still_s),
        predicted_isd_pct=whole_run_isd_pct(elapsed_s, [(seconds, side.predicted) for seconds, side in sides], still_s),
        promised_pct=promised_pct(role, job.tag, promise),
    )


# Sharing by pair of clusters and by user.


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


def pair_lines(spans: Iterable[Span], clusters: Mapping[int, int | None], now_s: float) -> tuple[PairLine, ...]:
    """A line for each pair of clusters."""
    groups: dict[tuple[int | None, int | None], list[Span]] = defaultdict(list)
    for span in spans:
        groups[clusters.get(span.resident_job), clusters.get(span.guest_job)].append(span)
    lines = [_pair_line(kind, members, now_s) for kind, members in groups.items()]
    unknown = -1
    return tuple(
        sorted(
            lines,
            key=lambda line: tuple(unknown if c is None else c for c in (line.resident_cluster, line.guest_cluster)),
        )
    )


def _pair_line(kind: tuple[int | None, int | None], spans: Sequence[Span], now_s: float) -> PairLine:
    known = [span for span in spans if None not in rates_of(span)]
    busy_s = sum(gpu_s(span, now_s) for span in known)
    work_s = busy_s + sum(saved_s(span, now_s) for span in known)
    isd = [tuple(isd_of_rate(rate) for rate in rates_of(span)) for span in known]
    return PairLine(
        *kind,
        spans=len(spans),
        measured_spans=sum(measured(span) for span in spans),
        hours=sum(span_s(span, now_s) for span in spans) / 3600,
        resident_isd_pct=mean([resident for resident, _ in isd if resident is not None]),
        guest_isd_pct=mean([guest for _, guest in isd if guest is not None]),
        ps_pct=100 * (1 - busy_s / work_s) if work_s else None,
    )


def saved_by_job_s(spans: Iterable[Span], now_s: float) -> dict[int, float]:
    """GPU time saved by each job: half of what its spans saved."""
    saved: dict[int, float] = defaultdict(float)
    for span in spans:
        for job in (span.resident_job, span.guest_job):
            saved[job] += saved_s(span, now_s) / 2
    return saved


def owner_lines(lines: Iterable[JobLine], saved_s_by_job: Mapping[int, float]) -> tuple[OwnerLine, ...]:
    """A line for each user."""
    groups: dict[str, list[JobLine]] = defaultdict(list)
    for line in lines:
        groups[line.job.user].append(line)
    return tuple(
        OwnerLine(
            user,
            len(members),
            sum(bool(line.partners) for line in members),
            sum(saved_s_by_job.get(line.job.raw_id, 0.0) for line in members) / 3600,
            sum(line.isd_pct is not None for line in members),
            mean([line.isd_pct for line in members if line.isd_pct is not None]),
        )
        for user, members in sorted(groups.items())
    )
