"""Figures for Prometheus, in the text format that node_exporter's textfile collector reads.

Every family is there from the first day on, at 0 where nothing has happened: an alert on a metric that does not exist
never fires. What cannot be read (Slurm, the store, the spool) is absent; of the store ``gpushare_store_readable`` says
so.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_gpushare.helper.explain import KINDS
from slurm_gpushare.node.delivery import INCOMING, NODES, REJECTED, SUFFIX
from slurm_gpushare.protocol.history import ERRORS, OUTSIDERS, Decision, Span
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.report.job_figures import Distribution, gpu_s, lasted_s, saved_s, spread
from slurm_gpushare.report.job_view import History, JobView, with_history
from slurm_gpushare.report.status import GpuLine
from slurm_gpushare.store.sharing import BROKEN_PROMISES, STRIKES
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.stored_jobs import COUNTED

_RECORDS = ("final", "interim", "duplicate", "rejected", "ignored", "excess", "stray", "stuck")
_GPU_STATES = ("shared", "busy", "idle", "down")
_JOB_STATES = ("pending", "running", "suspended", "completing")
_COUNTERS = (
    ("holds", "Cards kept until the helper answered.", "holds", 1),
    ("hold_seconds", "Card time that these holds cost.", "hold_ms", 1000),
    ("pauses", "Jobs that were paused so that a neighbour got the speed it was promised.", f"{COUNTED}paused", 1),
    ("strikes", "Running jobs that used more of their card than was measured of their token.", STRIKES, 1),
    ("promises_broken", "Running jobs that the helper saw slowed past their promise, as the audit trail has them.",
     BROKEN_PROMISES, 1),
    ("outsiders", "Jobs beside which processes of no job used the card: doctor on the node says whose.", OUTSIDERS, 1),
    ("helper_ticks", "Ticks of the helper.", "ticks", 1),
    ("helper_tick_seconds", "Time spent in ticks.", "tick_ms", 1000),
)  # fmt: skip
"""Plain counters: name, help, the store's name for it, how many of the store's are one of ours."""


@dataclass(frozen=True, slots=True)
class SpoolState:
    """Files that wait, and files that were refused."""

    waiting: int
    oldest_s: float
    rejected: int


def spool_state(spool_dir: Path) -> SpoolState | None:
    """None where this user may not look."""
    try:
        places = [place for name in (NODES, INCOMING) if (place := spool_dir / name).is_dir() or name == INCOMING]
        entries = [entry for place in places for entry in os.scandir(place) if entry.name.endswith(SUFFIX)]
        ages = [time.time() - entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        rejected = spool_dir / REJECTED
        refused = sum(entry.name.endswith(SUFFIX) for entry in os.scandir(rejected)) if rejected.is_dir() else 0
    except OSError:
        return None
    return SpoolState(len(ages), max(ages, default=0.0), refused)


@dataclass(frozen=True, slots=True)
class LastDay:
    """The last day."""

    saved_gpu_s: float
    """What was expected counts where nothing was measured."""
    shared_gpu_s: float
    isd_pct: Distribution
    """Measured, of jobs that ended and shared."""
    past_promise: int


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What comes from the store, all of it or nothing."""

    counters: Mapping[str, int]
    heartbeat_s: int
    """0: never."""
    day: LastDay


def store_figures(store: Store, promise: SitePromises, now_s: float) -> StoreFigures:
    """Read them. Of a damaged store any exception may come, and it comes here: numbers are seen to be numbers."""
    counters = {name: int(count) for name, count in store.counters.all().items()}
    return StoreFigures(counters, int(store.live.heartbeat_s() or 0), last_day(store, promise, now_s))


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP gpushare_{name} {text}"
    yield f"# TYPE gpushare_{name} {kind}"
    for labels, value in samples.items():
        yield f"gpushare_{name}{labels} {'NaN' if math.isnan(value) else f'{value:.10g}'}"


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _family(name, "gauge", text, {"": value})


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': value for name, value in sorted(values.items())}


def metrics(
    gpus: Sequence[GpuLine] | None,
    jobs: Sequence[JobView],
    stored: StoreFigures | None = None,
    spool: SpoolState | None = None,
    heartbeat_s: int | None = None,
) -> str:
    """All families that can be told. `gpus` is None where Slurm does not answer."""
    lines = [] if gpus is None else [*_now(gpus, jobs)]
    lines += _gauge(
        "store_readable", "Whether the store can be read; 0: what comes from it is absent.", stored is not None
    )
    if heartbeat_s is not None:
        text = "When the helper was last alive, in seconds since 1970; 0: not that anybody knows."
        lines += _gauge("helper_heartbeat_seconds", text, heartbeat_s)
    if stored:
        lines += _counted(Counter(stored.counters))
        lines += _of_the_day(stored.day)
    if spool:
        lines += _gauge("spool_waiting", "Records that wait to be taken in.", spool.waiting)
        lines += _gauge("spool_oldest_seconds", "Age of the oldest waiting record.", spool.oldest_s)
        lines += _gauge("spool_rejected", "Files in the rejected directory.", spool.rejected)
    return "\n".join(lines) + "\n"


def _now(gpus: Sequence[GpuLine], jobs: Sequence[JobView]) -> Iterator[str]:
    """What Slurm says."""
    states, job_states = Counter(line.state for line in gpus), Counter(job.state.lower() for job in jobs)
    by_state = _labelled("state", {state: states[state] for state in _GPU_STATES})
    of_jobs = _labelled("state", dict.fromkeys(_JOB_STATES, 0) | job_states)
    yield from _family("gpus", "gauge", "GPUs of the shared partitions by state.", by_state)
    yield from _gauge("pairs", "Pairs of jobs that share a GPU now.", sum(line.shared for line in gpus))
    yield from _family("jobs", "gauge", "Tagged jobs by state.", of_jobs)


def _of_the_day(day: LastDay) -> Iterator[str]:
    """What it brings and what it costs. A slow-down of nobody is NaN, as Prometheus has it."""
    saved = "GPU time that sharing saved in the last 24 hours; as expected where it was not measured."
    yield from _gauge("saved_gpu_seconds_1d", saved, day.saved_gpu_s)
    yield from _gauge("shared_gpu_seconds_1d", "GPU time with two jobs on a card in 24 hours.", day.shared_gpu_s)
    isd = day.isd_pct
    quantiles = {"0.5": isd.median, "0.95": isd.p95}
    shares = {name: math.nan if value is None else value / 100.0 for name, value in quantiles.items()}
    text = "Measured slow-down (0.25: 25 % longer than alone) of jobs that shared and ended in the last 24 hours."
    yield from _family("slowdown_ratio_1d", "gauge", text, _labelled("quantile", shares))
    yield from _gauge("slowdown_measured_jobs_1d", "Jobs in gpushare_slowdown_ratio_1d.", isd.count)
    text = "Of these jobs those that were slowed by more than was promised to them."
    yield from _gauge("broken_promises_1d", text, day.past_promise)


def _counted(counters: Counter[str]) -> Iterator[str]:
    made = {name.removeprefix(COUNTED): count for name, count in counters.items() if name.startswith(COUNTED)}
    decisions = _labelled("kind", dict.fromkeys(KINDS, 0) | made)
    records = _labelled("outcome", {name: counters[name] for name in _RECORDS})
    cards = _labelled("outcome", {name: counters[f"cards_{name}"] for name in ("won", "lost")})
    yield from _family("decisions_total", "counter", "Decisions of the helper by kind.", decisions)
    yield from _family("records_total", "counter", "Telemetry records by outcome.", records)
    text = "Cards that became empty with one of our jobs next in the queue: whether the helper decided who got them."
    yield from _family("cards_total", "counter", text, cards)
    for name, text, of, parts in _COUNTERS:
        yield from _family(f"{name}_total", "counter", text, {"": counters[of] / parts})
    failed = {name.removeprefix(ERRORS): count for name, count in counters.items() if name.startswith(ERRORS)}
    text = "What went wrong in the helper and was tried again, by what it was about to do; its log says where."
    yield from _family("errors_total", "counter", text, _labelled("kind", {"tick": 0} | failed))


# What sharing did in the last day, from the store alone: no question to slurmdbd every minute.


DAY_S = 86400.0


def last_day(store: Store, promise: SitePromises, now_s: float) -> LastDay:
    """The day before `now_s`."""
    since_s = now_s - DAY_S
    spans = [_within(span, since_s, now_s) for span in store.sharing.between(since_s, now_s)]
    ended: dict[int, JobView] = {}
    for run in store.runs.between(since_s, now_s):
        known = ended.get(run.job_id)
        lasted = max(run.end_s - run.start_s, known.elapsed_s or 0.0 if known else 0.0)
        ended[run.job_id] = JobView(
            str(run.job_id), run.job_id, -1, "", "", None, int(run.end_s) - int(lasted), int(run.end_s), now_s, lasted
        )
    shared: dict[int, list[Span]] = defaultdict(list)
    periods = {job: [(view.start_s or 0, view.end_s or now_s)] for job, view in ended.items()}
    for span in store.sharing.of_jobs(periods):
        for job in {span.resident_job, span.guest_job} & ended.keys():
            shared[job].append(span)
    decided: dict[int, list[Decision]] = defaultdict(list)
    for decision in store.decisions.of_jobs({job: periods[job] for job in shared}):
        decided[decision.job_id].append(decision)
    views = [with_history(ended[job], History(own, decided[job]), promise) for job, own in shared.items()]
    return LastDay(
        saved_gpu_s=sum(saved_s(span, now_s) for span in spans),
        shared_gpu_s=sum(gpu_s(span, now_s) for span in spans),
        isd_pct=spread(view.measured_isd_pct for view in views if view.measured_isd_pct is not None),
        past_promise=sum(view.past_promise for view in views),
    )


def _within(span: Span, start_s: float, end_s: float) -> Span:
    ended_s = end_s if span.end_s is None else min(span.end_s, end_s)
    inside = replace(span, start_s=int(max(span.start_s, start_s)), end_s=int(ended_s))
    part = lasted_s(inside, end_s) / max(lasted_s(span, end_s), 1.0)
    return replace(inside, paused_s=round(part * span.paused_s))
