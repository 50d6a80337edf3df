"""What happened to jobs, as plain data: who they are, spans of sharing and decisions.

No database is needed to hold them, so that a login node, which has none, can read what was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from slurm_gpushare.protocol.stop_orders import LONGEST_PAUSE_S
from slurm_gpushare.protocol.tag import Tag


def isd_of_rate(rate: float | None) -> float | None:
    """Slow-down while sharing, in per cent."""
    return 100.0 * (1.0 / rate - 1.0) if rate else None


def rate_of_isd(isd_pct: float | None) -> float | None:
    """The rate that slows by so much."""
    return None if isd_pct is None else 1.0 / (1.0 + isd_pct / 100.0)


@dataclass(frozen=True, slots=True)
class SpanSide:
    """A span as one of its two jobs sees it."""

    job: int
    neighbour: int
    neighbour_token: str
    joined: bool
    """Whether it came to the other one."""
    predicted: float | None
    """Its rate, as it was expected."""
    seen: float | None
    """Its rate, as it was measured."""

    @property
    def rate(self) -> float | None:
        """As measured, else as expected."""
        return self.predicted if self.seen is None else self.seen

    @property
    def expected_isd_pct(self) -> float | None:
        return isd_of_rate(self.predicted)

    @property
    def measured_isd_pct(self) -> float | None:
        return isd_of_rate(self.seen)


@dataclass(frozen=True, slots=True)
class Span:
    """Two jobs on one card, or two gangs on all cards of a node, from `start_s` to `end_s` (None: still)."""

    resident_job: int
    guest_job: int
    resident_token: str
    guest_token: str
    node: str
    gpu_index: int
    gpu_model: str
    start_s: int
    end_s: int | None = None
    resident_rate: float | None = None
    """Predicted."""
    guest_rate: float | None = None
    resident_rate_seen: float | None = None
    guest_rate_seen: float | None = None
    id: int = 0
    gpus: int = 1
    """Of gangs: all GPUs of the node, of which `gpu_index` is the first."""
    paused_s: int = 0
    """How long one of the two stood still: no time beside each other."""

    @property
    def sides(self) -> tuple[SpanSide, SpanSide]:
        """Resident and guest."""
        resident, guest = (self.resident_job, self.resident_token), (self.guest_job, self.guest_token)
        return (
            SpanSide(self.resident_job, *guest, False, self.resident_rate, self.resident_rate_seen),
            SpanSide(self.guest_job, *resident, True, self.guest_rate, self.guest_rate_seen),
        )

    def side_of(self, job: int) -> SpanSide:
        """The side of one of the two."""
        resident, guest = self.sides
        return resident if job == resident.job else guest

    @property
    def cards(self) -> tuple[tuple[str, int], ...]:
        """Node and index of every card that the two share."""
        return tuple((self.node, self.gpu_index + more) for more in range(self.gpus))


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about one job."""

    job_id: int
    at_s: int
    kind: str
    """A word of at most 16 letters: ``placed``, ``alone``, ``released``, ``waits``, ``extended``, ``requeued``, ..."""
    node: str | None = None
    gpu_index: int | None = None
    partner_job: int | None = None
    rate: float | None = None
    """Predicted, of this job beside the partner."""
    reasons: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the decision rested on: numbers, tokens, our own words. JSON."""


SLACK_S = 5.0
"""How far the clocks of a node and of the controller may be apart."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """One job: all that Slurm's restart count joins."""

    job_key: str
    job_id: int
    """SLURM_JOB_ID."""
    uid: int
    first_submit_s: int
    submit_s: int
    """As Slurm has it: a requeue resets it."""
    restarts: int
    start_s: int | None
    token: str | None
    tag: str
    """As AdminComment had it; empty once we took it off."""
    end_s: int | None = None
    id: int = 0

    def goes_on_as(self, other: StoredJob) -> bool:
        """Whether `other`, of the same key and seen later, is the same job: not submitted since, or put back."""
        same_submission = other.submit_s == self.submit_s and other.restarts >= self.restarts
        return other.uid == self.uid and (same_submission or other.restarts > self.restarts)


OPTED_OUT = "opted-out"
"""The kind of decision that is the owner's: the job was taken out of sharing."""
ERRORS = "errors_"
"""Begins the names of counters of what went wrong in the helper, by kind."""
OUTSIDERS = "outsiders"
"""Counter of jobs beside which processes of no job used the card."""


def sides_by_job(spans: Iterable[Span]) -> dict[int, SpanSide]:
    """Of spans that last: each job's side."""
    return {side.job: side for span in spans for side in span.sides}


def last_of_equals(decisions: Iterable[Decision]) -> list[Decision]:
    """Of decisions that say the same about a job, the last, where it was made."""
    latest: dict[tuple[object, ...], Decision] = {}
    for decision in decisions:
        key = decision.reasons.get("key", decision.job_id)
        identity = (key, decision.kind, decision.node, decision.gpu_index, decision.partner_job)
        latest.pop(identity, None)
        latest[identity] = decision
    return list(latest.values())


# Whose decisions these are: a task that waits has its array's id, and gets one of its own when it starts.


def by_own_id(decisions: Iterable[Decision], raw_ids: Mapping[str, int]) -> list[Decision]:
    """Each decision under the SLURM_JOB_ID of the job that its key names, as far as `raw_ids` knows the key."""
    found = []
    for decision in decisions:
        own = raw_ids.get(str(decision.reasons.get("key")), decision.job_id)
        found.append(decision if own == decision.job_id else replace(decision, job_id=own))
    return found


def of_job(decisions: Iterable[Decision], raw_id: int, key: str, array_id: int) -> list[Decision]:
    """The decisions about one job, those from before it had its own id among them."""
    mine = {raw_id, array_id}
    own = (d for d in decisions if d.job_id in mine and d.reasons.get("key", key) == key)
    return by_own_id(own, {key: raw_id})


# What its tag said, by what was decided: other tools replace AdminComment when a job ends (jobstats does).


JOINS = frozenset({"beside", "together", "succeeds"})
"""The decisions by which they came."""
PLACED = JOINS | {"alone"}
"""Those by which any sharer got its card."""


def remembered_tag(decisions: Sequence[Decision], end_s: float) -> Tag:
    """What was decided about a job that ended: its promise, its pauses, what it was given; decisions oldest first.

    A pause whose end nobody wrote down lasted no longer than a pause may.
    """
    placed = [decision for decision in decisions if decision.kind in PLACED]
    says = placed[-1].reasons if placed else {}
    turns = [(decision.kind, decision.at_s) for decision in decisions if decision.kind in ("paused", "resumed")]
    paused_s = 0.0
    for (kind, at_s), (then, then_s) in pairwise([*turns, ("ended", end_s)]):
        if kind == "paused":
            paused_s += then_s - at_s if then == "resumed" else min(then_s - at_s, LONGEST_PAUSE_S)
    return Tag(
        cluster=says.get("cluster"),
        gang=says.get("gpus"),
        max_isd_pct=says.get("max_isd_pct"),
        successor=bool(placed) and placed[-1].kind == "succeeds",
        given_min=max((int(d.reasons.get("given_min") or 0) for d in decisions), default=0),
        paused_before_s=max(round(paused_s), 0),
    )
