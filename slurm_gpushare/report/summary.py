"""What sharing did in a period: accounted jobs and spans of sharing in, one `Report` out. Pure arithmetic.

A job that ran for E seconds, d of them beside a neighbour that left it the rate r, did E - d (1 - r) seconds of
work as counted alone; its ISD is E divided by that, less one. Two jobs at rates r and g on one card for d seconds
did d (r + g) seconds of work in d seconds of GPU time, so they saved d (r + g - 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.sharing import Span

GUEST, RESIDENT, UNSHARED, OTHER = "guest", "resident", "unshared", "no token"


@dataclass(frozen=True, slots=True)
class Promise:
    """The site's two promises, in per cent."""

    resident_pct: float
    guest_pct: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five numbers; None where there is nothing to describe."""

    count: int
    mean: float | None = None
    median: float | None = None
    p95: float | None = None
    max: float | None = None


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


@dataclass(frozen=True, slots=True)
class PairLine:
    """All spans of one kind of pair: a resident of one cluster, a guest of another."""

    resident_cluster: int | None
    guest_cluster: int | None
    spans: int
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
    isd_mean_pct: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What sharing did between `start_s` and `end_s`."""

    start_s: float
    end_s: float
    jobs: tuple[JobLine, ...]
    spans: tuple[Span, ...]
    profiled: int
    shared: int
    busy_gpu_h: float
    """GPU hours that the jobs which shared kept cards busy."""
    solo_gpu_h: float
    """GPU hours that the same jobs would have needed alone."""
    measured_spans: int
    isd_pct: Spread
    prediction_error_points: float | None
    """Mean distance of predicted from measured ISD, over jobs that have both."""
    waits_s: Mapping[str, Spread]
    wait_avoided_h: float | None
    """Sum over guests of the wait for a whole GPU that the plan expected when it placed them."""
    pairs: tuple[PairLine, ...]
    owners: tuple[OwnerLine, ...]

    @property
    def saved_gpu_h(self) -> float:
        return self.solo_gpu_h - self.busy_gpu_h

    @property
    def ps_pct(self) -> float | None:
        return None if not self.solo_gpu_h else 100 * self.saved_gpu_h / self.solo_gpu_h

    @property
    def past_promise(self) -> tuple[JobLine, ...]:
        return tuple(line for line in self.jobs if line.past_promise)


def spread(values: Iterable[float]) -> Spread:
    """The five numbers of `values`; percentiles by nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0)

    def rank(share: float) -> float:
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    return Spread(len(ordered), fmean(ordered), rank(0.5), rank(0.95), ordered[-1])


def isd_pct(elapsed_s: float, parts: Iterable[tuple[float, float]]) -> float | None:
    """Individual slow-down of a job that ran `elapsed_s`, of which each part is (seconds shared, rate)."""
    alone_s = elapsed_s - sum(seconds * (1 - rate) for seconds, rate in parts)
    return 100 * (elapsed_s / alone_s - 1) if alone_s > 0 else None


def span_s(span: Span, now_s: float) -> float:
    """How long the span lasted, so far."""
    return max((now_s if span.end_s is None else span.end_s) - span.start_s, 0.0)


@dataclass(frozen=True, slots=True)
class _Side:
    """A span from one job's point of view."""

    seconds: float
    partner: int
    guest: bool
    predicted: float | None
    seen: float | None


def _sides(spans: Iterable[Span], now_s: float) -> dict[int, list[_Side]]:
    sides: dict[int, list[_Side]] = defaultdict(list)
    for span in spans:
        seconds = span_s(span, now_s)
        sides[span.resident_job].append(
            _Side(seconds, span.guest_job, False, span.resident_rate, span.resident_rate_seen)
        )
        sides[span.guest_job].append(_Side(seconds, span.resident_job, True, span.guest_rate, span.guest_rate_seen))
    return sides


def _whole_run_isd(elapsed_s: float, parts: Sequence[tuple[float, float | None]]) -> float | None:
    """ISD over all parts; None as soon as one part's rate is unknown."""
    known = [(seconds, rate) for seconds, rate in parts if rate is not None]
    return isd_pct(elapsed_s, known) if len(known) == len(parts) else None


def _job_line(job: AccountedJob, sides: Sequence[_Side], promise: Promise, now_s: float) -> JobLine:
    cluster = job.tag.cluster if job.tag else None
    if not sides:
        return JobLine(job, UNSHARED if job.tag else OTHER, cluster)
    guest = any(side.guest for side in sides) and not (job.tag and job.tag.heir)
    end_s = now_s if job.end_s is None else job.end_s
    elapsed_s = max(end_s - job.start_s, job.elapsed_s) if job.start_s is not None else job.elapsed_s
    promised = promise.guest_pct if guest else promise.resident_pct
    own = job.tag.max_isd_pct if job.tag else None
    return JobLine(
        job=job,
        role=GUEST if guest else RESIDENT,
        cluster=cluster,
        partners=tuple(side.partner for side in sides),
        shared_s=sum(side.seconds for side in sides),
        isd_pct=_whole_run_isd(elapsed_s, [(side.seconds, side.seen) for side in sides]),
        predicted_isd_pct=_whole_run_isd(elapsed_s, [(side.seconds, side.predicted) for side in sides]),
        promised_pct=promised if own is None else min(own, promised),
    )


def _rate(seen: float | None, predicted: float | None) -> float | None:
    return seen if seen is not None else predicted


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _pair_lines(spans: Sequence[Span], clusters: Mapping[int, int | None], now_s: float) -> tuple[PairLine, ...]:
    groups: dict[tuple[int | None, int | None], list[Span]] = defaultdict(list)
    for span in spans:
        groups[clusters.get(span.resident_job), clusters.get(span.guest_job)].append(span)
    lines = []
    for (resident, guest), members in groups.items():
        rates = [
            (span_s(span, now_s), r, g)
            for span in members
            if (r := _rate(span.resident_rate_seen, span.resident_rate)) is not None
            and (g := _rate(span.guest_rate_seen, span.guest_rate)) is not None
        ]
        work_s = sum(seconds * (r + g) for seconds, r, g in rates)
        busy_s = sum(seconds for seconds, _, _ in rates)
        lines.append(
            PairLine(
                resident,
                guest,
                len(members),
                sum(span_s(span, now_s) for span in members) / 3600,
                _mean([100 * (1 / r - 1) for _, r, _ in rates if r > 0]),
                _mean([100 * (1 / g - 1) for _, _, g in rates if g > 0]),
                100 * (1 - busy_s / work_s) if work_s else None,
            )
        )
    unknown = -1
    return tuple(
        sorted(
            lines,
            key=lambda line: tuple(unknown if c is None else c for c in (line.resident_cluster, line.guest_cluster)),
        )
    )


def _saved_s(spans: Iterable[Span], now_s: float) -> dict[int, float]:
    """GPU time saved by each job: half of what its spans saved."""
    saved: dict[int, float] = defaultdict(float)
    for span in spans:
        r, g = _rate(span.resident_rate_seen, span.resident_rate), _rate(span.guest_rate_seen, span.guest_rate)
        if r is not None and g is not None:
            for job in (span.resident_job, span.guest_job):
                saved[job] += span_s(span, now_s) * (r + g - 1) / 2
    return saved


def _owner_lines(lines: Sequence[JobLine], saved_s: Mapping[int, float]) -> tuple[OwnerLine, ...]:
    groups: dict[str, list[JobLine]] = defaultdict(list)
    for line in lines:
        groups[line.job.user].append(line)
    return tuple(
        OwnerLine(
            user,
            len(members),
            sum(bool(line.partners) for line in members),
            sum(saved_s.get(line.job.raw_id, 0.0) for line in members) / 3600,
            _mean([line.isd_pct for line in members if line.isd_pct is not None]),
        )
        for user, members in sorted(groups.items())
    )


def summarise(
    jobs: Iterable[AccountedJob],
    spans: Iterable[Span],
    decisions: Iterable[Decision],
    promise: Promise,
    start_s: float,
    end_s: float,
) -> Report:
    """The report of a period; `spans` of jobs that are not among `jobs` are left out."""
    by_id = {job.raw_id: job for job in jobs}
    kept = tuple(span for span in spans if span.resident_job in by_id and span.guest_job in by_id)
    sides = _sides(kept, end_s)
    lines = tuple(_job_line(job, sides.get(job.raw_id, ()), promise, end_s) for job in by_id.values())
    shared = [line for line in lines if line.partners]
    saved_s = _saved_s(kept, end_s)
    overlap_s = sum(span_s(span, end_s) for span in kept)
    busy_s = sum(line.job.elapsed_s for line in shared) - overlap_s
    errors = [
        abs(line.isd_pct - line.predicted_isd_pct)
        for line in shared
        if line.isd_pct is not None and line.predicted_isd_pct is not None
    ]
    avoided = _wait_avoided_s(decisions, {line.job.raw_id for line in lines if line.role == GUEST})
    return Report(
        start_s=start_s,
        end_s=end_s,
        jobs=lines,
        spans=kept,
        profiled=sum(bool(line.job.tag and line.job.tag.probe) for line in lines),
        shared=len(shared),
        busy_gpu_h=busy_s / 3600,
        solo_gpu_h=(busy_s + sum(saved_s.values())) / 3600,
        measured_spans=sum(s.resident_rate_seen is not None and s.guest_rate_seen is not None for s in kept),
        isd_pct=spread(line.isd_pct for line in shared if line.isd_pct is not None),
        prediction_error_points=_mean(errors),
        waits_s={
            role: spread(line.wait_s for line in lines if line.role == role and line.wait_s is not None)
            for role in (GUEST, RESIDENT, UNSHARED, OTHER)
        },
        wait_avoided_h=None if avoided is None else avoided / 3600,
        pairs=_pair_lines(kept, {line.job.raw_id: line.cluster for line in lines}, end_s),
        owners=_owner_lines(lines, saved_s),
    )


def _wait_avoided_s(decisions: Iterable[Decision], guests: set[int]) -> float | None:
    """The expected waits of the guests' last placements, added up."""
    waits: dict[int, float] = {}
    for decision in decisions:
        wait_s = decision.reasons.get("wait_s")
        if decision.job_id in guests and decision.partner_job is not None and isinstance(wait_s, int | float):
            waits[decision.job_id] = float(wait_s)
    return sum(waits.values()) if waits else None
