"""One job, as Slurm's tables and the store (or what the helper published of it) tell it.

Every table, document, figure and page is made from a `JobView`. What nobody knows is None, and prints as ``---``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from slurm_gpushare.helper.explain import Reason, reason_of
from slurm_gpushare.node.figures import CpuAdvice, RunFigures, cpu_advice
from slurm_gpushare.protocol.history import (
    JOINS,
    OPTED_OUT,
    PLACED,
    SLACK_S,
    Decision,
    Span,
    SpanSide,
    StoredJob,
    by_own_id,
    rate_of_isd,
    remembered_tag,
)
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.report.job_figures import span_s, whole_run_isd_pct
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.queue import STANDING, Job
from slurm_gpushare.store.published import PublicJob

GUEST, SUCCESSOR, RESIDENT = "guest", "successor", "resident"
UNSHARED, OTHER, UNKNOWN = "unshared", "no token", "unknown"
ROLES = (GUEST, SUCCESSOR, RESIDENT, UNSHARED, OTHER, UNKNOWN)
JOINED = frozenset({GUEST, SUCCESSOR})
"""Who came to an occupied card, and so waited less."""
_OF_A_RUN = frozenset({"paused", "resumed", "extended"})
"""Those about a job that runs: of an earlier run they say nothing of this one."""
MEASURED_S = 10.0
"""A shorter stay is too short to be called measured."""
MEASURED_PART = 0.9
"""Of the time shared, so much must have been measured for a job to be."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of jobs besides what Slurm tells: of one job, or of a period."""

    spans: Sequence[Span] = ()
    decisions: Sequence[Decision] = ()
    runs: Mapping[int, RunFigures] = field(default_factory=dict)
    """By SLURM_JOB_ID."""
    complete: bool = False
    """Whether a job without a span is known not to have shared."""
    live: PublicJob | None = None
    """Of one job that is in the queue: what everybody may see of it."""
    jobs: Mapping[int, Sequence[StoredJob]] = field(default_factory=dict)
    """Who had a SLURM_JOB_ID, oldest first: Slurm gives ids anew."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One time beside a neighbour, from the job's point of view."""

    start_s: int
    end_s: int | None
    seconds: float
    """Without pauses."""
    node: str
    gpu_index: int
    beside: int | None
    """None where the site hides jobs from each other."""
    role: str
    expected_isd_pct: float | None
    measured_isd_pct: float | None
    gpus: int = 1
    """Of a gang: all of the node's, of which `gpu_index` is the first."""
    paused_s: int = 0
    """How long one of the two stood still meanwhile."""


@dataclass(frozen=True, slots=True)
class JobView:
    """The job at `now_s`; times are unix times."""

    key: str
    """As squeue prints it."""
    raw_id: int
    uid: int
    partition: str
    state: str
    submit_s: int | None
    start_s: int | None
    end_s: int | None
    now_s: float
    elapsed_s: float | None
    """How long it has run, or ran, as Slurm counts: what was suspended is left out. None: it has not started."""
    limit_s: int | None = None
    cpus: int = 0
    nodes: Sequence[str] = ()
    user: str = ""
    account: str = ""
    reason: str = ""
    """Slurm's, why it waits."""
    tag: Tag | None = None
    opted_out: bool = False
    """Its owner took it out of sharing."""
    paused: bool = False
    """It stands still now, by us."""
    accounted: AccountedJob | None = None
    """Its row of accounting, if it came from there."""

    card: str | None = None
    """Where it is now, or where it was sent: ``n7:2``, of a gang ``n7:0-3``."""
    partners: tuple[str, ...] = ()
    """Who is on that card with it, by key."""
    whole: bool = False
    """It has the whole card."""
    coming: bool = False
    """It was sent there and has not started."""
    live: PublicJob | None = None
    """What the helper last told everybody of it."""
    gpu_util_pct: float | None = None
    """What telemetry last said; for those who may read the store."""
    mem_used_pct: float | None = None

    role: str = UNKNOWN
    """One of `ROLES`."""
    stays: tuple[Stay, ...] = ()
    run: RunFigures | None = None
    """What was measured of it."""
    cpu_used_s: float | None = None
    expected_isd_pct: float | None = None
    """Over its whole run; None if it never shared."""
    measured_isd_pct: float | None = None
    """The same; None unless nearly all of the time that it shared was measured."""
    promised_pct: float | None = None
    """The most that sharing may slow it."""
    site_cap_pct: float | None = None
    """The most that the site lets any guest be slowed."""
    wait_forecast_s: float | None = None
    """The wait for a whole GPU that was forecast when it joined another job."""
    forecast_error_s: float | None = None
    """How far its start was from what it was told first while it waited."""

    @property
    def wall_s(self) -> float | None:
        """From its start to its end or now."""
        if self.start_s is None or self.elapsed_s is None:
            return None
        until_s = self.now_s if self.end_s is None else self.end_s
        return max(until_s - self.start_s, self.elapsed_s)

    @property
    def wait_s(self) -> int | None:
        """From submission to start."""
        if self.start_s is None or self.submit_s is None or self.elapsed_s is None:
            return None
        return max(self.start_s - self.submit_s, 0)

    @property
    def cluster(self) -> int | None:
        return self.tag.cluster if self.tag else None

    @property
    def probe(self) -> bool:
        """Whether it is the first run of its workload."""
        return self.tag is not None and self.tag.probe

    @property
    def cards(self) -> int:
        """Of a gang all of its node's, else 1: no other job shares."""
        return (self.tag.gang if self.tag else None) or 1

    @property
    def neighbours(self) -> tuple[int, ...]:
        """With whom it has shared, each once; 0 where the site hides them."""
        return tuple(dict.fromkeys(stay.beside or 0 for stay in self.stays))

    @property
    def shared_s(self) -> float:
        return sum((stay.seconds for stay in self.stays), 0.0)

    @property
    def given_back_s(self) -> int:
        """What was added to its time limit for what sharing cost it."""
        return 60 * self.tag.given_min if self.tag else 0

    @property
    def paused_s(self) -> float:
        """How long we have paused it, in all; one that ended in a pause was paused until its end."""
        return self.tag.paused_s(self.now_s if self.end_s is None else min(self.end_s, self.now_s)) if self.tag else 0.0

    @property
    def gpu_s(self) -> float:
        """Its GPU time: of the time that two have one card together, half is counted for each.

        Who is stopped has none of its card, though Slurm counts the time.
        """
        wall_s, elapsed_s = self.wall_s or 0.0, self.elapsed_s or 0.0
        stopped_s = max(self.paused_s - (wall_s - elapsed_s), 0.0)
        return self.cards * max(elapsed_s - stopped_s - self.shared_s / 2.0, 0.0)

    def gpus_held(self, shards_per_gpu: int) -> float | None:
        """GPUs that it had on average while it ran; None where nobody knows whether it shared.

        Shards of a job that takes no part are those of a whole card (before Slurm 23.11.5), or were asked for as such.
        """
        row = self.accounted
        if row is None or row.gpus or not row.shards:
            return float(row.gpus) if row else None
        if self.role == UNKNOWN or not self.elapsed_s:
            return None
        return self.gpu_s / self.elapsed_s if self.tag or self.stays else row.shards / shards_per_gpu

    @property
    def energy_kwh(self) -> float | None:
        """The card's mean power over its GPU time."""
        if self.run is None or self.run.power_w is None or self.elapsed_s is None:
            return None
        return self.run.power_w * self.gpu_s / 3.6e6

    @property
    def blind(self) -> bool:
        """Whether its card tells nothing of single jobs, so that nobody keeps its promise."""
        return bool((self.run and self.run.blind) or (self.live and self.live.blind))

    @property
    def past_promise(self) -> bool:
        seen, promised = self.measured_isd_pct, self.promised_pct
        return seen is not None and promised is not None and seen > promised

    @property
    def why(self) -> Reason | None:
        """Why it waits or stands still, as the helper says; None for a reason of a later release."""
        live = self.told
        asked = {"code": live.reason, "need": live.need, "have": live.have, "wait_s": live.wait_s} if live else {}
        return reason_of(asked)

    @property
    def told(self) -> PublicJob | None:
        """What the helper told of its waiting; it may have spoken before the job started."""
        return self.live if self.state == "PENDING" or self.paused else None

    @property
    def cpu_pct(self) -> float | None:
        """CPU efficiency: by accounting, else by telemetry."""
        if self.cpus < 1:
            return None
        if self.cpu_used_s and self.elapsed_s:
            return min(100.0 * self.cpu_used_s / (self.elapsed_s * self.cpus), 100.0)
        if self.run is not None and self.run.cpu_cores is not None:
            return min(100.0 * self.run.cpu_cores / self.cpus, 100.0)
        return None

    @property
    def cpu_advice(self) -> CpuAdvice | None:
        """How many CPUs would suit it better, if other than it has."""
        return cpu_advice(self.cpus, self.run)

    @property
    def gpu_mem_pct(self) -> float | None:
        run = self.run
        if run is None or not run.gpu_mem_peak_mib or not run.gpu_mem_total_mib:
            return None
        return 100.0 * run.gpu_mem_peak_mib / run.gpu_mem_total_mib


def from_queue(job: Job, now_s: float) -> JobView:
    """A job of the queue, or one that slurmctld still remembers. A token that was taken off takes no part."""
    ended = not job.pending and not job.running
    start_s = job.start_s if job.nodes or not ended else None  # cancelled while it waited: its start was a forecast
    elapsed_s = job.elapsed_s(now_s)
    if ended and start_s is not None:
        elapsed_s = max(min(job.end_s or now_s, now_s) - start_s, 0.0)
    return JobView(
        job.key, job.raw_id, job.uid, ",".join(job.partitions), job.state, job.submit_s, start_s,
        job.end_s if ended else None, now_s, elapsed_s, job.limit_s, job.cpus, job.nodes, "", job.account, job.reason,
        None if job.opted_out else job.tag, job.opted_out, job.paused,
    )  # fmt: skip


def from_accounting(job: AccountedJob, now_s: float) -> JobView:
    return JobView(
        job.key, job.raw_id, job.uid, job.partition, job.state, job.submit_s, job.start_s, job.end_s, now_s,
        None if job.start_s is None else job.elapsed_s, job.limit_s, job.cpus, job.nodes, job.user, job.account, "",
        job.tag, paused=job.state in STANDING and job.tag is not None and job.tag.paused is not None, accounted=job,
    )  # fmt: skip


def with_history(view: JobView, known: History, promise: SitePromises, cpu_used_s: float | None = None) -> JobView:
    """The same job with what is known besides: `known` is of this job alone, and of its earlier runs too."""
    known = _of_this_run(view, known)
    tag = _tag(view, known)
    started_s = view.start_s if view.elapsed_s is not None else None
    view = replace(
        view, tag=tag, live=known.live, run=known.runs.get(view.raw_id), cpu_used_s=cpu_used_s,
        forecast_error_s=_forecast_error_s(started_s, known.decisions),
        site_cap_pct=promise.of(guest=True, own_pct=None),
    )  # fmt: skip
    if tag is None and any(decision.kind == OPTED_OUT for decision in known.decisions):
        view = replace(view, opted_out=True)
    if not known.spans:
        left_alone = UNSHARED if known.complete or view.probe else UNKNOWN
        return replace(view, role=left_alone if tag else OTHER)
    spans = [_as_of_now(span, view.raw_id, known.live) for span in known.spans]
    sides = [span.side_of(view.raw_id) for span in spans]
    stays = tuple(_stay(span, side, tag, view.now_s) for span, side in zip(spans, sides, strict=True))
    role = role_of(tag, any(side.joined for side in sides))
    wall_s, still_s, lasted_s = view.wall_s, view.paused_s, [stay.seconds for stay in stays]
    expected, seen = [side.predicted for side in sides], [side.rate for side in sides]
    seen_s = sum(seconds for seconds, side in zip(lasted_s, sides, strict=True) if side.seen is not None)
    if seen_s < max(MEASURED_S, MEASURED_PART * sum(lasted_s)):
        seen = []
    return replace(
        view,
        role=role,
        stays=stays,
        expected_isd_pct=whole_run_isd_pct(wall_s, list(zip(lasted_s, expected, strict=True)), still_s),
        measured_isd_pct=whole_run_isd_pct(wall_s, list(zip(lasted_s, seen, strict=bool(seen))), still_s),
        promised_pct=promise.of(guest=role == GUEST, own_pct=tag.max_isd_pct if tag else None),
        wait_forecast_s=_wait_forecast_s(known.decisions) if role in JOINED else None,
    )


def _of_this_run(view: JobView, known: History) -> History:
    """What is known of a job's last run alone, which has ended when Slurm says so: the helper hears of it later."""
    begun_s, run = inf if view.start_s is None or view.elapsed_s is None else view.start_s, known.runs.get(view.raw_id)
    spans = [
        span if span.end_s is not None or view.end_s is None else replace(span, end_s=max(view.end_s, span.start_s))
        for span in known.spans
        if span.start_s >= begun_s
    ]
    earlier = [d for d in known.decisions if d.at_s < begun_s and d.kind in _OF_A_RUN]
    runs = {} if run is None or (run.end_s is not None and run.end_s < begun_s) else {view.raw_id: run}
    return replace(known, spans=spans, decisions=[d for d in known.decisions if d not in earlier], runs=runs)


def views_of(jobs: Iterable[AccountedJob], known: History, promise: SitePromises, now_s: float) -> tuple[JobView, ...]:
    """The jobs of a period, each with its part of what is known; of a job that comes twice the last row."""
    bare = {job.raw_id: job for job in jobs}
    spans: dict[int, list[Span]] = defaultdict(list)
    decisions: dict[int, list[Decision]] = defaultdict(list)
    for span in known.spans:
        for raw_id in {span.resident_job, span.guest_job}:
            spans[raw_id].append(span)
    for decision in by_own_id(known.decisions, {job.key: job.raw_id for job in bare.values()}):
        decisions[decision.job_id].append(decision)
    found = []
    for raw_id, job in bare.items():
        first_s, last_s = _period(job, known.jobs.get(raw_id, ()))
        own_spans = [span for span in spans.get(raw_id, ()) if first_s <= span.start_s <= last_s]
        own_decisions = [decision for decision in decisions.get(raw_id, ()) if first_s <= decision.at_s <= last_s]
        history = History(own_spans, own_decisions, known.runs, known.complete)
        found.append(with_history(from_accounting(job, now_s), history, promise))
    return tuple(found)


def _period(job: AccountedJob, stored: Sequence[StoredJob]) -> tuple[float, float]:
    """From its first submission to its end; always, where nobody is known to have had its id."""
    if not stored:
        return 0.0, inf
    mine = [item for item in stored if item.uid == job.uid and item.first_submit_s <= job.submit_s]
    begun_s = mine[-1].first_submit_s if mine else job.submit_s
    return begun_s - SLACK_S, (inf if job.end_s is None else job.end_s + SLACK_S)


def role_of(tag: Tag | None, joined: bool) -> str:
    """Of a job that shared: who joined is a guest, or a successor if it came to have the card afterwards."""
    if not joined:
        return RESIDENT
    return SUCCESSOR if tag and tag.successor else GUEST


def _stay(span: Span, side: SpanSide, tag: Tag | None, now_s: float) -> Stay:
    measured_pct = side.measured_isd_pct if span_s(span, now_s) >= MEASURED_S else None
    return Stay(
        span.start_s, span.end_s, span_s(span, now_s), span.node, span.gpu_index, side.neighbour or None,
        role_of(tag, side.joined), side.expected_isd_pct, measured_pct, span.gpus, span.paused_s,
    )  # fmt: skip


def _as_of_now(span: Span, raw_id: int, live: PublicJob | None) -> Span:
    """A stay that lasts, with what the helper last measured: an owner's own file is older than the one for all."""
    if span.end_s is not None or live is None or live.measured_isd_pct is None:
        return span
    rate = rate_of_isd(live.measured_isd_pct)
    if span.resident_job == raw_id:
        return replace(span, resident_rate_seen=rate)
    return replace(span, guest_rate_seen=rate)


def _wait_forecast_s(decisions: Iterable[Decision]) -> float | None:
    """Of one job: the wait for a whole GPU that was forecast when it was last placed beside another."""
    waits = [decision.reasons.get("wait_s") for decision in decisions if decision.kind in JOINS]
    known = [float(wait_s) for wait_s in waits if isinstance(wait_s, int | float)]
    return known[-1] if known else None


def _forecast_error_s(start_s: int | None, decisions: Iterable[Decision]) -> float | None:
    """Of one job that has started: how far from the first forecast of its start."""
    told = (d.at_s + float(d.reasons["wait_s"]) for d in decisions if d.kind == "waits" and d.reasons.get("wait_s"))
    first_s = next(told, None)
    return None if start_s is None or first_s is None else abs(start_s - first_s)


# What its tag said, from the store: other tools replace AdminComment when a job ends (jobstats does).


def _tag(view: JobView, known: History) -> Tag | None:
    """What the store says of a job that has started, else its tag: jobs of earlier releases have no more."""
    if view.start_s is None or view.opted_out or not (known.spans or any(d.kind in PLACED for d in known.decisions)):
        return view.tag
    until_s = view.now_s if view.end_s is None else min(view.end_s, view.now_s)
    says, tag = remembered_tag(known.decisions, until_s), view.tag or Tag()
    own = (s.resident_token if s.resident_job == view.raw_id else s.guest_token for s in known.spans)
    return replace(
        tag,
        token=tag.token or next(own, None) or None,
        cluster=tag.cluster if says.cluster is None else says.cluster,
        gang=says.gang or tag.gang,
        successor=says.successor or tag.successor,
        max_isd_pct=tag.max_isd_pct if says.max_isd_pct is None else says.max_isd_pct,
        given_min=max(says.given_min, tag.given_min),
        paused=None,
        paused_before_s=max(says.paused_before_s, round(tag.paused_s(until_s))),
    )
