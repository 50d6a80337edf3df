"""Decisions as they are recorded: numbers and our own words, never anything of the user's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.reasons import Reason
from slurm_gpushare.helper.snapshot import Placement, Reasons
from slurm_gpushare.protocol.history import OPTED_OUT, Decision, rate_of_isd
from slurm_gpushare.slurm.queue import Job

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
