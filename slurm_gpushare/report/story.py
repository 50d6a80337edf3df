"""Why a job was placed as it was: a few lines from its tag, from Slurm and, where it may be read, from the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_gpushare.slurm.tag import Tag
from slurm_gpushare.store.decisions import Decision
from slurm_gpushare.store.sharing import Span

CLUSTER_NAMES = {0: "light", 1: "middle", 2: "heavy"}


@dataclass(frozen=True, slots=True)
class Known:
    """A job as Slurm knows it, from the queue or from accounting."""

    key: str
    raw_id: int
    state: str
    reason: str
    partition: str
    nodes: Sequence[str]
    tag: Tag | None


def _pct(value: Any) -> str:
    return f"{float(value):.0f} %"


def _when(at_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def headline(job: Known) -> str:
    """What state the job is in."""
    where = f" on {','.join(job.nodes)}" if job.nodes else ""
    why = f" ({job.reason})" if job.reason and job.state == "PENDING" else ""
    return f"Job {job.key}: {job.state}{why}{where}, partition {job.partition}"


def from_tag(job: Known) -> list[str]:
    """What the tag alone tells: enough for any user."""
    tag = job.tag
    if tag is None:
        return ["It takes no part in sharing: it carries no known token, or was left alone when it was submitted."]
    if tag.probe:
        return ["Its workload is new: it runs on a whole GPU and is measured, so that later jobs of it can share."]
    lines = []
    if tag.cluster is not None:
        name = CLUSTER_NAMES.get(tag.cluster)
        lines.append(f"Workload: cluster {tag.cluster}" + (f" ({name})" if name else ""))
    if tag.original:
        lines.append(f"Asked for {tag.original}" + (f" on {tag.nodes}" if tag.nodes else ""))
    if tag.max_isd_pct is not None:
        lines.append(f"Its owner accepts at most {tag.max_isd_pct} % slow-down")
    if tag.placed:
        node, _, index = tag.placed.rpartition(":")
        verb = "goes to" if job.state == "PENDING" else "was sent to"
        lines.append(f"It {verb} GPU {index} of {node}")
    elif tag.lease and job.state == "PENDING":
        lines.append("It waits a few seconds for the helper; after that Slurm may start it as it was asked for")
    elif job.state == "PENDING":
        lines.append("It waits in Slurm's queue with the request that its owner made")
    return lines


def _numbers(reasons: Mapping[str, Any], succeeds: bool) -> Iterable[str]:
    if "guest_isd_pct" in reasons and succeeds:
        yield f"expected to run {_pct(reasons['guest_isd_pct'])} longer in all"
    elif "guest_isd_pct" in reasons:
        yield f"expected to run {_pct(reasons['guest_isd_pct'])} slower while it shares"
    if "resident_isd_pct" in reasons:
        budget = f" of {_pct(reasons['resident_budget_pct'])} allowed" if "resident_budget_pct" in reasons else ""
        yield f"its neighbour loses {_pct(reasons['resident_isd_pct'])} of its run{budget}"
    if "wait_s" in reasons:
        yield f"a whole GPU was expected in {float(reasons['wait_s']):.0f} s"
    if reasons.get("explored"):
        yield "tried to learn how well the two go together"


_DONE = {
    "alone": "placed first on an empty card, half of it left for another",
    "beside": "placed beside {partner}",
    "together": "placed together with {partner}",
    "succeeds": "placed beside {partner}, which ends soon, to have the card after it",
    "unshared": "placed on a whole card",
    "waits": "no place: {why}",
    "taken-back": "placement taken back: {why}",
    "extended": "time limit lengthened by what its neighbour cost it",
    "tagged": "tagged, since the submit hook was away; its request is untouched",
    "slowed": "slowed more than promised: {why}. These two workloads are not paired again",
    "requeued": "requeued: {why}",
    "out-of-memory": "ran out of GPU memory beside {partner}; its workload now counts with {mem_mib} MiB",
}


def of_decision(decision: Decision) -> str:
    """One decision as a line."""
    reasons = dict(decision.reasons)
    partner = f"job {decision.partner_job}" if decision.partner_job is not None else "a neighbour"
    words = {"partner": partner, "why": reasons.get("why", ""), "mem_mib": reasons.get("mem_mib", "---")}
    text = _DONE.get(decision.kind, decision.kind).format(**words)
    place = f" (GPU {decision.gpu_index} of {decision.node})" if decision.node and decision.kind in _PLACES else ""
    numbers = "; ".join(_numbers(reasons, decision.kind == "succeeds"))
    return f"{_when(decision.at_s)}  {text}{place}" + (f": {numbers}" if numbers else "")


_PLACES = {"alone", "beside", "together", "succeeds", "unshared"}


def of_span(span: Span, raw_id: int) -> str:
    """One stay beside a neighbour as a line."""
    resident = span.resident_job == raw_id
    other = span.guest_job if resident else span.resident_job
    seen = span.resident_rate_seen if resident else span.guest_rate_seen
    expected = span.resident_rate if resident else span.guest_rate
    until = _when(span.end_s) if span.end_s is not None else "now"
    parts = [
        f"{label} {100 * (1 / rate - 1):.0f} %" for label, rate in (("expected", expected), ("measured", seen)) if rate
    ]
    return f"{_when(span.start_s)}  shared GPU {span.gpu_index} of {span.node} with job {other} until {until}" + (
        f": slow-down {', '.join(parts)}" if parts else ""
    )


def tell(job: Known, decisions: Sequence[Decision], spans: Sequence[Span]) -> list[str]:
    """The whole story, in a few lines; of equal decisions only the last is told."""
    latest: dict[tuple[Any, ...], Decision] = {}
    for decision in decisions:
        if decision.reasons.get("key", job.key) == job.key:
            identity = (decision.kind, decision.node, decision.gpu_index, decision.partner_job)
            latest.pop(identity, None)
            latest[identity] = decision
    events = [(decision.at_s, of_decision(decision)) for decision in latest.values()]
    events += [(span.start_s, of_span(span, job.raw_id)) for span in spans]
    return [headline(job), *(f"  {line}" for line in [*from_tag(job), *(text for _, text in sorted(events))])]
