"""What sharing did in the last day, from the store alone: no question to slurmdbd every minute."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from slurm_gpushare.history import Decision, Span, SpanSide
from slurm_gpushare.promises import SitePromises
from slurm_gpushare.report.distribution import Distribution, spread
from slurm_gpushare.report.roles import promised_pct, remembered_tag, role_of
from slurm_gpushare.report.slow_down import gpu_s, lasted_s, saved_s, span_s, whole_run_isd_pct
from slurm_gpushare.store.store import Store

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class LastDay:
    """The last day."""

    saved_gpu_s: float
    """What was expected counts where nothing was measured."""
    shared_gpu_s: float
    isd_pct: Distribution
    """Measured, of jobs that ended and shared."""
    past_promise: int


def last_day(store: Store, promise: SitePromises, now_s: float) -> LastDay:
    """The day before `now_s`."""
    since_s = now_s - DAY_S
    spans = [_within(span, since_s, now_s) for span in store.sharing.between(since_s, now_s)]
    elapsed_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for run in store.runs.between(since_s, now_s):
        elapsed_s[run.job_id] = max(elapsed_s.get(run.job_id, 0.0), run.end_s - run.start_s)
        end_s[run.job_id] = run.end_s
    sides: dict[int, list[tuple[float, SpanSide]]] = defaultdict(list)
    for span in store.sharing.of_jobs(elapsed_s):
        for side in span.sides:
            sides[side.job].append((span_s(span, now_s), side))
    shared = elapsed_s.keys() & sides.keys()
    decided: dict[int, list[Decision]] = defaultdict(list)
    for decision in store.decisions.of_jobs(shared):
        decided[decision.job_id].append(decision)
    found: list[float] = []
    broken = 0
    for job in shared:
        tag = remembered_tag(decided[job], end_s[job])
        isd = whole_run_isd_pct(elapsed_s[job], [(s, side.seen) for s, side in sides[job]], tag.paused_before_s)
        if isd is not None:
            found.append(isd)
            broken += isd > promised_pct(role_of(tag, any(side.joined for _, side in sides[job])), tag, promise)
    return LastDay(
        saved_gpu_s=sum(saved_s(span, now_s) for span in spans),
        shared_gpu_s=sum(gpu_s(span, now_s) for span in spans),
        isd_pct=spread(found),
        past_promise=broken,
    )


def _within(span: Span, start_s: float, end_s: float) -> Span:
    ended_s = end_s if span.end_s is None else min(span.end_s, end_s)
    inside = replace(span, start_s=int(max(span.start_s, start_s)), end_s=int(ended_s))
    part = lasted_s(inside, end_s) / max(lasted_s(span, end_s), 1.0)
    return replace(inside, paused_s=round(part * span.paused_s))
