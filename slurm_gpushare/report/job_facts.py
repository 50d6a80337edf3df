"""The figures of one job, as seff shows them for CPUs: what it used, with whom it shared, what that cost and saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurm_gpushare.helper.reasons import Code, Reason, words
from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import OPTED_OUT, Span, SpanSide, rate_of_isd
from slurm_gpushare.protocol.settings import SitePromises
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.report.cpu_advice import CpuAdvice, cpu_advice
from slurm_gpushare.report.job_history import JobHistory
from slurm_gpushare.report.slow_down import (
    JOINED,
    given_back_s,
    paused_s,
    promised_pct,
    role_of,
    span_s,
    waits_avoided_s,
    whole_run_isd_pct,
)
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.queue import STANDING, Job
from slurm_gpushare.store.published import PublicJob


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job as Slurm knows it, from the queue or from accounting."""

    key: str
    raw_id: int
    uid: int
    state: str
    reason: str
    partition: str
    nodes: Sequence[str]
    submit_s: int | None
    start_s: int | None
    end_s: int | None
    limit_s: int | None
    cpus: int
    tag: Tag | None
    opted_out: bool = False
    """Its owner took it out of sharing."""

    def until_s(self, now_s: float) -> float:
        """Now, or when it ended."""
        return now_s if self.end_s is None else min(self.end_s, now_s)

    def since_start_s(self, now_s: float) -> float | None:
        """How long ago it started, up to its end."""
        if self.start_s is None or self.state == "PENDING":
            return None
        return max(self.until_s(now_s) - self.start_s, 0.0)

    def elapsed_s(self, now_s: float) -> float | None:
        """How long it has run, or ran, as Slurm counts: without the time in which we had it suspended."""
        since_start_s = self.since_start_s(now_s)
        if since_start_s is None or self.tag is None:
            return since_start_s
        return max(since_start_s - self.tag.suspended_s(self.until_s(now_s)), 0.0)


def from_queue(job: Job) -> KnownJob:
    ended = job.state not in {"PENDING"} and not job.running
    began_s = job.start_s if job.nodes or not ended else None  # cancelled while it waited: its start was a forecast
    return KnownJob(
        job.key, job.raw_id, job.uid, job.state, job.reason, ",".join(job.partitions), job.nodes, job.submit_s,
        began_s, job.end_s if ended else None, job.limit_s, job.cpus,
        None if job.opted_out else job.tag, job.opted_out,
    )  # fmt: skip


def from_accounting(job: AccountedJob) -> KnownJob:
    return KnownJob(
        job.key, job.raw_id, job.uid, job.state, "", job.partition, job.nodes, job.submit_s, job.start_s, job.end_s,
        job.limit_s, job.cpus, job.tag,
    )  # fmt: skip


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
class JobFacts:
    """All that can be told about a job; None is unknown."""

    job: KnownJob
    role: str | None
    elapsed_s: float | None
    waited_s: float | None
    run: RunFigures | None
    cpu_used_s: float | None
    stays: tuple[Stay, ...]
    expected_isd_pct: float | None
    measured_isd_pct: float | None
    promised_pct: float | None
    wait_avoided_s: float | None
    given_back_s: int
    paused: bool
    paused_s: float
    """By us, in all."""
    reason: Reason | None
    live: PublicJob | None = None
    """What everybody may see of it now."""

    @property
    def cpu_pct(self) -> float | None:
        """CPU efficiency: by accounting, else by telemetry."""
        if self.job.cpus < 1:
            return None
        if self.cpu_used_s and self.elapsed_s:
            return min(100.0 * self.cpu_used_s / (self.elapsed_s * self.job.cpus), 100.0)
        if self.run is not None and self.run.cpu_cores is not None:
            return min(100.0 * self.run.cpu_cores / self.job.cpus, 100.0)
        return None

    @property
    def cpu_advice(self) -> CpuAdvice | None:
        """How many CPUs would suit it better, if other than it has."""
        return cpu_advice(self.job.cpus, self.run)

    @property
    def gpu_mem_pct(self) -> float | None:
        run = self.run
        if run is None or not run.gpu_mem_peak_mib or not run.gpu_mem_total_mib:
            return None
        return 100.0 * run.gpu_mem_peak_mib / run.gpu_mem_total_mib

    @property
    def energy_kwh(self) -> float | None:
        """The card's mean power over the time of the job; of shared time half."""
        if self.run is None or self.run.power_w is None or self.elapsed_s is None:
            return None
        gpus = (self.job.tag.gang if self.job.tag else None) or 1
        return gpus * self.run.power_w * (self.elapsed_s - self.shared_s / 2.0) / 3.6e6

    @property
    def shared_s(self) -> float:
        return sum(stay.seconds for stay in self.stays)


def _stay(span: Span, side: SpanSide, tag: Tag | None, now_s: float) -> Stay:
    return Stay(
        span.start_s, span.end_s, span_s(span, now_s), span.node, span.gpu_index, side.neighbour or None,
        role_of(tag, side.joined), side.expected_isd_pct, side.measured_isd_pct, span.gpus, span.paused_s,
    )  # fmt: skip


def _as_of_now(span: Span, job: KnownJob, live: PublicJob | None) -> Span:
    """A stay that lasts, with what the helper last measured: an owner's own file is older than the one for all."""
    if span.end_s is not None or live is None or live.measured_isd_pct is None:
        return span
    rate = rate_of_isd(live.measured_isd_pct)
    if span.resident_job == job.raw_id:
        return replace(span, resident_rate_seen=rate)
    return replace(span, guest_rate_seen=rate)


def facts_of(
    job: KnownJob, history: JobHistory, promise: SitePromises, now_s: float, cpu_used_s: float | None = None
) -> JobFacts:
    """Put together what Slurm and the helper know of a job."""
    if job.tag is None and any(decision.kind == OPTED_OUT for decision in history.decisions):
        job = replace(job, opted_out=True)
    elapsed_s, since_start_s = job.elapsed_s(now_s), job.since_start_s(now_s)
    spans = [_as_of_now(span, job, history.live) for span in history.spans]
    sides = [span.side_of(job.raw_id) for span in spans]
    stays = tuple(_stay(span, side, job.tag, now_s) for span, side in zip(spans, sides, strict=True))
    lasted_s = [stay.seconds for stay in stays]
    role = role_of(job.tag, any(stay.role in JOINED for stay in stays)) if stays else None
    still_s = paused_s(job.tag, job.end_s, now_s)
    expected, seen = [side.predicted for side in sides], [side.seen for side in sides]
    return JobFacts(
        job=job,
        role=role,
        elapsed_s=elapsed_s,
        waited_s=None if job.submit_s is None or elapsed_s is None else max((job.start_s or 0) - job.submit_s, 0),
        run=history.run,
        cpu_used_s=cpu_used_s,
        stays=stays,
        expected_isd_pct=whole_run_isd_pct(since_start_s, list(zip(lasted_s, expected, strict=True)), still_s),
        measured_isd_pct=whole_run_isd_pct(since_start_s, list(zip(lasted_s, seen, strict=True)), still_s),
        promised_pct=None if role is None else promised_pct(role, job.tag, promise),
        wait_avoided_s=waits_avoided_s(history.decisions, {job.raw_id} if role in JOINED else set()).get(job.raw_id),
        given_back_s=given_back_s(job.tag),
        paused=job.state in STANDING and job.tag is not None and job.tag.paused is not None,
        paused_s=still_s,
        reason=_why_it_waits(job, history.live),
        live=history.live,
    )


def _why_it_waits(job: KnownJob, live: PublicJob | None) -> Reason | None:
    """The helper's reason, while it holds."""
    if live is None or not live.reason or not (job.state == "PENDING" or live.paused):
        return None
    try:
        return Reason(Code(live.reason), live.need, live.have, live.wait_s)
    except ValueError:
        return None  # of a later release


_OF_THE_JOB = ("raw_id", "state", "partition", "submit_s", "end_s", "limit_s", "cpus")
_OF_THE_FACTS = (
    "role", "elapsed_s", "waited_s", "wait_avoided_s", "given_back_s", "paused", "paused_s", "cpu_pct", "gpu_mem_pct",
    "energy_kwh", "shared_s", "expected_isd_pct", "measured_isd_pct", "promised_pct",
)  # fmt: skip


def job_json(facts: JobFacts, story: Sequence[str], note: str) -> dict[str, Any]:
    """The job for programs; null is unknown, and `note` says why."""
    job, reason = facts.job, facts.reason
    tag = job.tag
    return {
        "job_id": job.key,
        **{name: getattr(job, name) for name in _OF_THE_JOB},
        **{name: getattr(facts, name) for name in _OF_THE_FACTS},
        "nodes": list(job.nodes),
        "cluster": tag.cluster if tag else None,
        "probe": bool(tag and tag.probe),
        "takes_part": tag is not None,
        "opted_out": job.opted_out,
        "start_s": None if facts.elapsed_s is None else job.start_s,
        "cpu_advice": asdict(facts.cpu_advice) if facts.cpu_advice else None,
        "telemetry": asdict(facts.run) if facts.run else None,
        "stays": [asdict(stay) for stay in facts.stays],
        "now": asdict(facts.live) if facts.live else None,
        "reason": None if reason is None else {
            "code": reason.code.value, "need": reason.need, "have": reason.have, "wait_s": reason.wait_s,
            "why": words(reason)[0], "what_would_change_it": words(reason)[1],
        },
        "story": list(story),
        "note": note,
    }  # fmt: skip
