"""Each job of a period, and what sharing meant for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_gpushare.history import Span, SpanSide
from slurm_gpushare.promises import SitePromises
from slurm_gpushare.report.roles import OTHER, UNKNOWN, UNSHARED, paused_s, promised_pct, role_of
from slurm_gpushare.report.slow_down import span_s, whole_run_isd_pct
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
