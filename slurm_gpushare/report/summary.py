"""What sharing did in a period: accounted jobs and spans of sharing in, one `Report` out. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.report.cpu_advice import CpuSummary, summarise_cpus
from slurm_gpushare.report.job_history import History, by_own_id
from slurm_gpushare.report.job_lines import (
    JobLine,
    OwnerLine,
    PairLine,
    job_lines,
    owner_lines,
    pair_lines,
    saved_by_job_s,
)
from slurm_gpushare.report.slow_down import (
    JOINED,
    ROLES,
    Distribution,
    given_back_s,
    lasted_s,
    mean,
    measured,
    paused_s,
    rates_of,
    span_s,
    spread,
    waits_avoided_s,
    weighted_mean,
)
from slurm_gpushare.slurm.accounting import AccountedJob


@dataclass(frozen=True, slots=True)
class Report:
    """What sharing did between `start_s` and `end_s`."""

    start_s: float
    end_s: float
    jobs: tuple[JobLine, ...]
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
    wait_avoided_h: float | None
    """Sum over guests and successors of the wait for a whole GPU that was expected when they were placed."""
    waits_avoided: int
    """Jobs in that sum."""
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
    pairs: tuple[PairLine, ...]
    owners: tuple[OwnerLine, ...]
    cpus: CpuSummary

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
    def past_promise(self) -> tuple[JobLine, ...]:
        return tuple(line for line in self.jobs if line.past_promise)


def summarise(
    jobs: Iterable[AccountedJob], known: History, promise: SitePromises, start_s: float, end_s: float
) -> Report:
    """The report of a period. A span counts for those of its two jobs that are among `jobs`, half for each."""
    by_id, runs = {job.raw_id: job for job in jobs}, known.runs
    decided = by_own_id(known.decisions, {job.key: job.raw_id for job in by_id.values()})
    kept = tuple(span for span in known.spans if span.resident_job in by_id or span.guest_job in by_id)
    lines = job_lines(by_id.values(), kept, promise, end_s, known.complete)
    shared = [line for line in lines if line.partners]
    saved_s = {job: saved for job, saved in saved_by_job_s(kept, end_s).items() if job in by_id}
    gpu_s = {line.job.raw_id: _gpu_s(line) for line in lines}
    busy_s = sum(gpu_s[line.job.raw_id] for line in shared)
    errors = _prediction_errors(shared)
    avoided_s = waits_avoided_s(decided, {line.job.raw_id for line in lines if line.role in JOINED})
    given = [back_s for job in by_id.values() if (back_s := given_back_s(job.tag))]
    return Report(
        start_s=start_s,
        end_s=end_s,
        jobs=lines,
        spans=kept,
        profiled=sum(bool(line.job.tag and line.job.tag.probe) for line in lines),
        shared=len(shared),
        complete=known.complete,
        busy_gpu_h=busy_s / 3600,
        solo_gpu_h=(busy_s + sum(saved_s.values())) / 3600,
        measured_spans=sum(map(measured, kept)),
        isd_pct=spread(line.isd_pct for line in shared if line.isd_pct is not None),
        expected_isd_pct=spread(_expected_only(shared)),
        prediction_error_points=mean(errors),
        predictions=len(errors),
        waits_s={role: spread(_waits_s(lines, role)) for role in ROLES},
        wait_avoided_h=sum(avoided_s.values()) / 3600 if avoided_s else None,
        waits_avoided=len(avoided_s),
        gpu_busy_pct=weighted_mean((runs[job.raw_id].gpu_busy_pct, job.elapsed_s) for job in _with_run(shared, runs)),
        energy_kwh=_energy_kwh(gpu_s, runs),
        measured_jobs=sum(job in runs for job in by_id),
        given_back_s=sum(given),
        given_back_jobs=len(given),
        paused_s=sum(paused_s(job.tag, job.end_s, end_s) for job in by_id.values()),
        pauses=sum(decision.kind == "paused" and decision.job_id in by_id for decision in decided),
        pairs=pair_lines(kept, {line.job.raw_id: line.cluster for line in lines}, end_s),
        owners=owner_lines(lines, saved_s),
        cpus=summarise_cpus(by_id.values(), runs),
    )


def _gpu_s(line: JobLine) -> float:
    """GPU time of a job: of the time that two have one card together, half is counted for each.

    Who is stopped by a signal has none of its card, though Slurm counts the time.
    """
    ran_s = line.job.elapsed_s - (line.job.tag.stopped_before_s if line.job.tag else 0)
    return line.job.cards * (ran_s - line.shared_s / 2)


def _prediction_errors(shared: Iterable[JobLine]) -> list[float]:
    both = ((line.isd_pct, line.predicted_isd_pct) for line in shared)
    return [abs(seen - predicted) for seen, predicted in both if seen is not None and predicted is not None]


def _expected_only(shared: Iterable[JobLine]) -> Iterator[float]:
    for line in shared:
        if line.isd_pct is None and line.predicted_isd_pct is not None:
            yield line.predicted_isd_pct


def _waits_s(lines: Iterable[JobLine], role: str) -> Iterator[float]:
    return (line.wait_s for line in lines if line.role == role and line.wait_s is not None)


def _with_run(lines: Iterable[JobLine], runs: Mapping[int, RunFigures]) -> Iterator[AccountedJob]:
    return (line.job for line in lines if line.job.raw_id in runs)


def _energy_kwh(gpu_s: Mapping[int, float], runs: Mapping[int, RunFigures]) -> float | None:
    power_w = {job: run.power_w for job, run in runs.items() if run.power_w is not None}
    used = [power_w[job] * seconds for job, seconds in gpu_s.items() if job in power_w]
    return sum(used) / 3.6e6 if used else None


# A report's figures spread over its period: GPU time by day, and savings as they accrue.


POINTS = 200


@dataclass(slots=True)
class Stretch:
    """GPU time between two moments, in hours: of cards with one job of ours, and of cards with two."""

    start_s: float
    end_s: float
    alone_h: float = 0.0
    shared_h: float = 0.0


def stretches(report: Report) -> list[Stretch]:
    """The period in hours, days or weeks, however many jobs there are."""
    found = _empty(report)
    if not found:
        return []
    for line in report.jobs:
        if line.job.start_s is not None:
            for stretch, hours in _spread(found, line.job.start_s, line.job.end_s or report.end_s):
                stretch.alone_h += line.job.cards * hours
    own = {line.job.raw_id for line in report.jobs}
    for span in report.spans:
        sides = (span.resident_job in own) + (span.guest_job in own)
        for stretch, hours in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            stretch.alone_h = max(stretch.alone_h - sides * span.gpus * hours, 0.0)
            stretch.shared_h += sides / 2 * span.gpus * hours
    return found


def _empty(report: Report) -> list[Stretch]:
    """The stretches from the first start on."""
    begun = [line.job.start_s for line in report.jobs if line.job.start_s is not None]
    first_s = max(report.start_s, min(begun, default=report.start_s))
    return [Stretch(a, b) for a, b in _steps(first_s, report.end_s)]


def shared_by_card(report: Report) -> tuple[list[Stretch], dict[tuple[str, int], list[float]]]:
    """The stretches of the period, and for each card that was shared the part of each for which it was."""
    found = _empty(report)
    at = {id(stretch): number for number, stretch in enumerate(found)}
    cards: dict[tuple[str, int], list[float]] = {}
    for span in report.spans:
        for stretch, hours in _spread(found, span.start_s, span.start_s + lasted_s(span, report.end_s)):
            for card in span.cards:
                shares = cards.setdefault(card, [0.0] * len(found))
                shares[at[id(stretch)]] += hours * 3600 / (stretch.end_s - stretch.start_s)
    return found, cards


_STEPS = (
    (1 / 12, timedelta(minutes=1)), (0.5, timedelta(minutes=5)), (3.0, timedelta(hours=1)),
    (10.0, timedelta(hours=6)), (150.0, timedelta(days=1)), (math.inf, timedelta(days=7)),
)  # fmt: skip
"""How long a period may be for its stretches to be so long."""


def _steps(start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    days = (end_s - start_s) / 86400
    step = next(step for most_days, step in _STEPS if days <= most_days)
    at = datetime.fromtimestamp(start_s).replace(second=0, microsecond=0)
    if step >= timedelta(hours=1):
        at = at.replace(hour=0 if days > 3 else at.hour, minute=0)
    elif step > timedelta(minutes=1):
        at = at.replace(minute=at.minute // 5 * 5)
    while at.timestamp() < end_s:
        yield at.timestamp(), (at + step).timestamp()
        at += step


def _spread(found: list[Stretch], start_s: float, end_s: float) -> Iterator[tuple[Stretch, float]]:
    """The stretches that lie between two moments, each with its hours of it."""
    size_s = found[0].end_s - found[0].start_s
    at = max(int((start_s - found[0].start_s) // size_s) - 1, 0)  # a day has 23 hours now and then
    while at < len(found) and found[at].start_s < end_s:
        hours = (min(end_s, found[at].end_s) - max(start_s, found[at].start_s)) / 3600
        if hours > 0:
            yield found[at], hours
        at += 1


def accrued(report: Report) -> list[tuple[float, float]]:
    """GPU hours saved up to each moment of the period: a span's saving is booked while it lasts, not when it ends."""
    own = {line.job.raw_id for line in report.jobs}
    slopes: list[tuple[float, float]] = []
    for span in report.spans:
        resident, guest = rates_of(span)
        begin_s = max(float(span.start_s), report.start_s)
        end_s = min(span.start_s + lasted_s(span, report.end_s), report.end_s)
        if resident is not None and guest is not None and end_s > begin_s:
            share = ((span.resident_job in own) + (span.guest_job in own)) / 2
            running = span_s(span, report.end_s) / lasted_s(span, report.end_s)
            slope = share * running * span.gpus * (resident + guest - 1) / 3600
            slopes += [(begin_s, slope), (end_s, -slope)]
    return list(_thinned(_integral(sorted(slopes))))


def crosses_period(report: Report) -> bool:
    """Whether two jobs shared across the beginning or the end of the period."""
    return any(
        span.start_s < report.start_s or span.start_s + lasted_s(span, report.end_s) > report.end_s
        for span in report.spans
    )


def _integral(slopes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    total = slope = 0.0
    last_s: float | None = None
    for at_s, change in slopes:
        if last_s is not None:
            total += slope * (at_s - last_s)
        slope += change
        last_s = at_s
        yield at_s, total


def _thinned(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found = list(points)
    step = max(len(found) // POINTS, 1)
    return [*found[::step], found[-1]] if found else []
