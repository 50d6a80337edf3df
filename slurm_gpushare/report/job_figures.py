"""Rates to slow-downs and savings.

A job that ran for E seconds, d of them beside a neighbour that left it the rate r, did E - d (1 - r) seconds of
work as counted alone; its ISD is E divided by that, less one. Two jobs at rates r and g on one card for d seconds
did d (r + g) seconds of work in d seconds of GPU time, so they saved d (r + g - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from slurm_gpushare.protocol.history import Span

if TYPE_CHECKING:
    from slurm_gpushare.report.job_view import JobView


def lasted_s(span: Span, now_s: float) -> float:
    """How long the span lasted, so far, with pauses."""
    return max((now_s if span.end_s is None else span.end_s) - span.start_s, 0.0)


def span_s(span: Span, now_s: float) -> float:
    """How long the two ran beside each other in the span, so far: while one of them stood still, neither slowed."""
    return max(lasted_s(span, now_s) - span.paused_s, 0.0)


def gpu_s(span: Span, now_s: float) -> float:
    """GPU time that the two shared in the span, so far: gangs have several cards."""
    return span_s(span, now_s) * span.gpus


def rates_of(span: Span) -> tuple[float | None, float | None]:
    """Of resident and guest: as measured, else as expected."""
    resident, guest = span.sides
    return resident.rate, guest.rate


def measured(span: Span) -> bool:
    return span.resident_rate_seen is not None and span.guest_rate_seen is not None


def saved_s(span: Span, now_s: float) -> float:
    """GPU time that the two saved; 0 where nothing is known of them."""
    resident, guest = rates_of(span)
    return 0.0 if resident is None or guest is None else gpu_s(span, now_s) * (resident + guest - 1.0)


def whole_run_isd_pct(
    elapsed_s: float | None, parts: Sequence[tuple[float, float | None]], paused_s: float = 0.0
) -> float | None:
    """Slow-down over the whole run of a job that ran `elapsed_s`, of which each part is (seconds shared, rate).

    None as soon as one part's rate is unknown, or if there is no part. `elapsed_s` is wall time, and of it the job
    itself was paused for `paused_s`, which count as its slow-down.
    """
    known = [(seconds, rate) for seconds, rate in parts if rate is not None]
    if elapsed_s is None or not parts or len(known) < len(parts):
        return None
    # Slurm counts whole seconds: a job cannot have shared for longer than it ran.
    known.append((paused_s, 0.0))
    lasted_s = max(elapsed_s, sum(seconds for seconds, _ in known))
    alone_s = lasted_s - sum(seconds * (1 - rate) for seconds, rate in known)
    return 100 * (lasted_s / alone_s - 1) if alone_s > 0 else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Many numbers in five, with how many they were; None where there is nothing to describe."""

    count: int
    mean: float | None = None
    median: float | None = None
    p95: float | None = None
    max: float | None = None


def spread(values: Iterable[float]) -> Distribution:
    """The five numbers of `values`; percentiles by nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0)

    def rank(share: float) -> float:
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    return Distribution(len(ordered), fmean(ordered), rank(0.5), rank(0.95), ordered[-1])


def weighted_mean(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Of (value, weight); what is unknown does not count."""
    known = [(value, weight) for value, weight in values if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


@dataclass(frozen=True, slots=True)
class CpuSummary:
    """The same over the jobs of a period."""

    judged: int
    """Jobs whose CPU use was measured."""
    short: int
    """Jobs whose GPU waited for CPUs."""
    spare: int
    """Jobs that had CPUs to spare."""
    spare_cpu_h: float
    """CPU hours that these had and would not have needed."""


def summarise_cpus(jobs: Iterable[JobView]) -> CpuSummary:
    """What the CPUs of these jobs were good for."""
    judged = [job for job in jobs if job.run is not None and job.run.cpu_cores is not None]
    advice = [(job, found) for job in judged if (found := job.cpu_advice) is not None]
    spare = [(job, found) for job, found in advice if not found.gpu_waits]
    unused_h = sum((job.cpus - found.cpus) * (job.elapsed_s or 0.0) for job, found in spare) / 3600
    return CpuSummary(len(judged), len(advice) - len(spare), len(spare), unused_h)
