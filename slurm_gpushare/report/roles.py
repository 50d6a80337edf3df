"""What a job was on its card, and what follows from it: the same in a report and in ``gpushare job``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from slurm_gpushare.coschedule.acting.pauses import LONGEST_PAUSE_S
from slurm_gpushare.history import Decision
from slurm_gpushare.promises import SitePromises
from slurm_gpushare.slurm.tag import Tag

GUEST, SUCCESSOR, RESIDENT = "guest", "successor", "resident"
UNSHARED, OTHER, UNKNOWN = "unshared", "no token", "unknown"
ROLES = (GUEST, SUCCESSOR, RESIDENT, UNSHARED, OTHER, UNKNOWN)
JOINED = frozenset({GUEST, SUCCESSOR})
"""Who came to an occupied card, and so waited less."""
JOINS = frozenset({"beside", "together", "succeeds"})
"""The decisions by which they came."""
PLACED = JOINS | {"alone"}
"""Those by which any sharer got its card."""


def role_of(tag: Tag | None, joined: bool) -> str:
    """Of a job that shared: who joined is a guest, or a successor if it came to have the card afterwards."""
    if not joined:
        return RESIDENT
    return SUCCESSOR if tag and tag.successor else GUEST


def promised_pct(role: str, tag: Tag | None, promise: SitePromises) -> float:
    """The most that sharing may slow it: the site's promise for its role, or its owner's own cap if that is less."""
    return promise.of(guest=role == GUEST, own_pct=tag.max_isd_pct if tag else None)


def remembered_tag(decisions: Sequence[Decision], end_s: float) -> Tag:
    """What the tag of a job that ended says of its promise and pauses, from its decisions, oldest first.

    The tag itself is in accounting. A pause whose end nobody wrote down lasted no longer than a pause may.
    """
    placed = [decision for decision in decisions if decision.kind in PLACED]
    turns = [(decision.kind, decision.at_s) for decision in decisions if decision.kind in ("paused", "resumed")]
    paused_s = 0.0
    for (kind, at_s), (then, then_s) in pairwise([*turns, ("ended", end_s)]):
        if kind == "paused":
            paused_s += then_s - at_s if then == "resumed" else min(then_s - at_s, LONGEST_PAUSE_S)
    return Tag(
        successor=bool(placed) and placed[-1].kind == "succeeds",
        max_isd_pct=placed[-1].reasons.get("max_isd_pct") if placed else None,
        paused_before_s=max(round(paused_s), 0),
    )


def given_back_s(tag: Tag | None) -> int:
    """What was added to its time limit for what sharing cost it."""
    return 60 * tag.given_min if tag else 0


def paused_s(tag: Tag | None, end_s: float | None, now_s: float) -> float:
    """How long we have paused it, in all; one that ended in a pause was paused until its end."""
    return tag.paused_s(now_s if end_s is None else min(end_s, now_s)) if tag else 0.0


def waits_avoided_s(decisions: Iterable[Decision], joined: set[int]) -> dict[int, float]:
    """By job: the wait for a whole GPU that was expected when it was last placed beside another."""
    waits: dict[int, float] = {}
    for decision in decisions:
        wait_s = decision.reasons.get("wait_s")
        if decision.job_id in joined and decision.kind in JOINS and isinstance(wait_s, int | float):
            waits[decision.job_id] = float(wait_s)
    return waits
