"""Sharing by pair of clusters and by user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_gpushare.history import Span, isd_of_rate
from slurm_gpushare.report.distribution import mean
from slurm_gpushare.report.job_lines import JobLine
from slurm_gpushare.report.slow_down import gpu_s, measured, rates_of, saved_s, span_s


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
