"""Decisions as they are recorded, and why a job waits: numbers and our own words, never anything of the user's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.snapshot import Placement, Reasons
from slurm_gpushare.protocol.history import OPTED_OUT, PLACED, Decision, last_of_equals, rate_of_isd
from slurm_gpushare.protocol.text import duration_text, moment, per_cent
from slurm_gpushare.slurm.queue import Job


class Code(StrEnum):
    """The reasons. At most 16 letters."""

    OFF = "off"
    SHADOW = "shadow"
    OWN_CAP = "own-cap"
    NO_PARTNER = "no-partner"
    PLACE = "place"
    PREEMPTION = "preemption"
    LIMIT = "limit"
    OWNERS = "owners"
    MPS_USER = "mps-user"
    MEMORY = "memory"
    TOO_LONG = "too-long"
    FORBIDDEN = "forbidden"
    PROMISE = "promise"
    EXPLORATION = "exploration"
    NOT_MEASURABLE = "not-measurable"
    TIME_LIMIT = "time-limit"
    PRIORITY = "priority"
    NO_GAIN = "no-gain"
    OTHERS_FIRST = "others-first"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits. Numbers that do not belong to the code are None."""

    code: Code
    need: float | None = None
    """What the job needs: MiB of GPU memory, seconds, or per cent of slow-down, by code."""
    have: float | None = None
    """The most that any card offers of it."""
    wait_s: float | None = None
    """Forecast of its wait."""


_WORDS: Mapping[Code, tuple[str, str]] = {
    Code.OFF: ("sharing is switched off", "the site's Policy"),
    Code.SHADOW: ("the site only works out what sharing would do", "the site's Policy"),
    Code.OWN_CAP: (
        "its owner accepts {need} % slow-down, and beside the best neighbour it could be up to {have} %",
        "a higher max= when it is submitted again",
    ),
    Code.NO_PARTNER: ("no card has a sharing job with room beside it", "a sharing job that starts"),
    Code.PLACE: (
        "no card with room beside it is on a node that the job may use and that has the CPUs and memory it asks for",
        "fewer CPUs, less memory, or fewer constraints",
    ),
    Code.PREEMPTION: (
        "the cards that it could join are being freed for a job that may preempt those on them",
        "that job's start",
    ),
    Code.LIMIT: (
        "a limit of its user, account or QOS on GPUs is reached, counted as the cards that its jobs hold",
        "one of those jobs that ends",
    ),
    Code.OWNERS: ("the site lets only jobs of one user or account share, and none of those has room", "ShareAcross"),
    Code.MPS_USER: ("MPS serves one user at a time on those cards, and none of that user's has room", "another card"),
    Code.MEMORY: (
        "it needs {need} MiB of GPU memory, and beside the best neighbour {have} MiB are free",
        "a neighbour that uses less, or a smaller batch",
    ),
    Code.TOO_LONG: (
        "it is expected to run {need}, and second halves go first to jobs of up to {have}",
        "a shorter job or time limit",
    ),
    Code.FORBIDDEN: ("every job it could join has slowed its workload too much before", "another neighbour"),
    Code.PROMISE: (
        "beside every job it could join, one of the two would be slowed by more than promised",
        "another neighbour, or one with more of its run left",
    ),
    Code.EXPLORATION: (
        "how it goes together with the jobs it could join is not known yet, and a trial could cost them too much",
        "a neighbour with more of its run left",
    ),
    Code.NOT_MEASURABLE: (
        "how it goes together with the jobs it could join is not known, and their cards tell nothing of single jobs",
        "a run beside them on a card without MPS",
    ),
    Code.TIME_LIMIT: (
        "sharing could make it, or the job it joins, miss its time limit",
        "a longer time limit",
    ),
    Code.PRIORITY: (
        "a job of higher priority waits for those cards, and this one could hold them up",
        "a time limit of at most {have}",
    ),
    Code.NO_GAIN: ("it is expected to finish sooner on a whole GPU", "a longer queue"),
    Code.OTHERS_FIRST: ("the places it could take went to other jobs", "one of those jobs that ends"),
    Code.PAUSED: (
        "it is paused, so that its neighbour gets the speed it was promised",
        "nothing; it goes on by itself",
    ),
}
_UNSHARED = ("its owner wants it unshared, or next to", "a higher max= in its comment")
_TIMES = frozenset({Code.TOO_LONG, Code.PRIORITY, Code.TIME_LIMIT})


def words(reason: Reason) -> tuple[str, str]:
    """The reason as a clause, and what would change it."""
    why, change = _UNSHARED if reason.code is Code.OWN_CAP and reason.have is None else _WORDS[reason.code]
    if reason.code is Code.PRIORITY and not reason.have:
        change = "nothing; that job goes first"
    show = duration_text if reason.code in _TIMES else _plain
    numbers = {"need": show(reason.need), "have": show(reason.have)}
    return why.format(**numbers), change.format(**numbers)


def _plain(value: float | None) -> str:
    return "---" if value is None or not math.isfinite(value) else f"{value:.0f}"


def sentence(reason: Reason) -> str:
    """One line for a log or a table."""
    why, change = words(reason)
    start = "" if reason.wait_s is None else f", its start is forecast in {duration_text(reason.wait_s)}"
    return f"waits{start}: {why}. What would change it: {change}"


def reason_of(told: Mapping[str, Any]) -> Reason | None:
    """Why a job waited, from the reasons of a decision; None if it was about something else, or of a later release."""
    try:
        code = Code(str(told["code"]))
    except (KeyError, ValueError):
        return None
    return Reason(code, told.get("need"), told.get("have"), told.get("wait_s"))


SHADOW = "shadow"
"""The kind of what would have been done."""


def _rounded(reasons: Reasons | Reason) -> dict[str, Any]:
    """The reasons that apply, short enough to keep for years."""
    found: dict[str, Any] = {}
    for name, value in ((field.name, getattr(reasons, field.name)) for field in fields(reasons)):
        if value is None or value is False:
            continue
        if isinstance(value, float):
            if value != value or value in (float("inf"), float("-inf")):
                continue
            value = round(value, 1)
        found[name] = value
    return found


def _asked(job: Job) -> dict[str, int]:
    """What a reader needs to know of the job's own request."""
    asked = {"gpus": job.gang, "max_isd_pct": job.tag.max_isd_pct if job.tag else None}
    return {name: value for name, value in asked.items() if value is not None}


def placed(job: Job, placement: Placement, partner: Job | None, policy: str, now_s: float) -> Decision:
    """A placement that Slurm accepted."""
    return Decision(
        job_id=job.raw_id,
        at_s=int(now_s),
        kind=str(placement.how),
        node=placement.place.node,
        gpu_index=placement.place.first,
        partner_job=partner.raw_id if partner else None,
        rate=rate_of_isd(placement.reasons.guest_isd_pct),
        reasons={"key": job.key, "policy": policy, **_asked(job), **_rounded(placement.reasons)},
    )


def shadowed(job: Job, placement: Placement, partner: Job | None, now_s: float) -> Decision:
    """A placement that was only worked out."""
    made = placed(job, placement, partner, "shadow", now_s)
    return replace(made, kind=SHADOW, reasons={**made.reasons, "how": str(placement.how)})


def waits(job: Job, reason: Reason, now_s: float) -> Decision:
    """No place now: the job waits with its original request."""
    return Decision(job.raw_id, int(now_s), "waits", reasons={"key": job.key, **_rounded(reason)})


def taken_back(job: Job, card: GpuAddress | None, why: str, now_s: float) -> Decision:
    """A placement that came to nothing."""
    return Decision(
        job.raw_id,
        int(now_s),
        "taken-back",
        node=card.node if card else None,
        gpu_index=card.index if card else None,
        reasons={"key": job.key, "why": why},
    )


def both(job: Job, other: Job, kind: str, now_s: float, why: str) -> list[Decision]:
    """The same about two jobs that share."""
    return [noted(job, kind, now_s, other, why=why), noted(other, kind, now_s, job, why=why)]


def opted_out(job: Job, now_s: float) -> Decision:
    """Its owner took it out of sharing. With the uid: nothing else says whose it was once the tag is gone."""
    return noted(job, OPTED_OUT, now_s, uid=job.uid)


def noted(job: Job, kind: str, now_s: float, partner: Job | None = None, **reasons: Any) -> Decision:
    """Anything else that was done about a job."""
    return Decision(
        job.raw_id,
        int(now_s),
        kind,
        partner_job=partner.raw_id if partner else None,
        reasons={"key": job.key, **reasons},
    )


# What was decided about a job and why, a line for each decision, for its owner.


_NO_NAMES: Mapping[int, str] = MappingProxyType({})


def _numbers(reasons: Mapping[str, Any]) -> Iterable[str]:
    if "resident_isd_pct" in reasons:
        budget = f", {per_cent(reasons['resident_budget_pct'])} are allowed" if "resident_budget_pct" in reasons else ""
        yield f"its neighbour is expected to lose {per_cent(reasons['resident_isd_pct'])} of its run{budget}"
    if float(reasons.get("wait_s") or 0.0) > 0.0:
        yield f"a whole GPU was expected in {duration_text(float(reasons['wait_s']))}"
    if reasons.get("explored"):
        yield "tried to learn how well the two go together"


DONE = {
    "alone": "placed first on an empty card, half of it left for another",
    "beside": "placed beside {partner}",
    "together": "placed together with {partner}",
    "succeeds": "placed beside {partner}, which ends soon, to have the card after it",
    "unshared": "placed on a whole card",
    "shadow": "would have been {would}, if this site shared",
    "waits": "{why}",
    "taken-back": "placement taken back: {why}",
    "extended": "time limit lengthened by what its neighbour cost it",
    "tagged": "tagged, since the submit hook was away; its request is untouched",
    "converted": "its workload has been measured while it waited: it may share now",
    "past-profile": "took more of the GPU than when it was measured: it is measured anew, and counted as a strike",
    "ran-while-paused": "used {seen} % of the GPU while it was paused: not paused again, and counted as a strike",
    OPTED_OUT: "taken out of sharing by its owner",
    "slowed": "slowed more than promised: {why}. These two workloads are kept apart for two weeks",
    "outgrown": "{why}",
    "card-fault": "its card was lost, or has errors that cannot be corrected; nobody joins anybody there",
    "mps-fault": "the MPS server of its card is in FAULT or does not answer: its work on the card may be lost; nobody "
    "joins it there, and MPS is started anew once the card is empty",
    "resume-waits": "still paused: {why}",
    "requeued": "requeued: {why}",
    "preempted": "{why}",
    "paused": "paused, so that {partner} gets the speed it was promised",
    "resumed": "went on after its pause",
    "out-of-memory": "ran out of GPU memory beside {partner}; its workload now counts with {mem_mib} MiB",
}

KINDS = tuple(DONE)
"""Every kind of decision that the helper makes."""
_PLACES = PLACED | {"unshared", "shadow"}


def of_decision(decision: Decision, names: Mapping[int, str] = _NO_NAMES) -> str:
    """One decision as a line. `names` are keys of array tasks by their SLURM_JOB_ID."""
    reasons = dict(decision.reasons)
    other = decision.partner_job
    partner = f"job {names.get(other, other)}" if other is not None else "a neighbour"
    waits = reason_of(decision.reasons)
    why = sentence(waits) if waits else reasons.get("why", "")
    would = DONE.get(str(reasons.get("how")), "placed").format(partner=partner)
    known = {name: reasons.get(name, "---") for name in ("mem_mib", "seen")}
    words = {"partner": partner, "why": why, "would": would, **known}
    text = DONE.get(decision.kind, decision.kind).format(**words)
    cards = f"all {reasons['gpus']} GPUs" if "gpus" in reasons else f"GPU {decision.gpu_index}"
    place = f" ({cards} of {decision.node})" if decision.node and decision.kind in _PLACES else ""
    numbers = "" if waits else "; ".join(_numbers(reasons))
    return f"{moment(decision.at_s, '%d %b %H:%M:%S')}  {text}{place}" + (f": {numbers}" if numbers else "")


def tell(key: str, decisions: Sequence[Decision], names: Mapping[int, str] = _NO_NAMES) -> list[str]:
    """What was decided about the job, in order; of equal decisions only the last is told."""
    own = (decision for decision in decisions if decision.reasons.get("key", key) == key)
    return [of_decision(decision, names) for decision in last_of_equals(own)]
