"""When the one that came last is paused, and when it goes on: a pure decision, for helper and simulator alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from slurm_gpushare.coschedule.acting.pauses import LONGEST_PAUSE_S
from slurm_gpushare.coschedule.pairs.judging import Standing

REST_S = 20.0
"""Between two pauses a job runs for at least so long."""


class PauseStep(StrEnum):
    """What to do about a pair."""

    LEAVE = "leave"
    PAUSE = "pause"
    RESUME = "resume"
    """As soon as its cores are free: it may wait for them for a while."""
    END = "end"
    """At once: it was paused for as long as may be."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """What the one that came last has been through, and how much of it there may be."""

    since_s: float | None = None
    """When the present pause began; None: it runs."""
    total_s: float = 0.0
    """Paused in all, the present pause included."""
    ran_s: float = math.inf
    """How long it has run since the last pause."""
    most_s: float = math.inf
    """``PauseMost`` of its run or limit."""
    end_moves_s: float = math.inf
    """How far its end may still move before it meets a reservation."""

    @property
    def room_s(self) -> float:
        return min(self.most_s - self.total_s, self.end_moves_s)


def next_step(
    resident: Standing, guest: Standing, pauses: Pauses, now_s: float, ahead_s: float, guest_first: bool = False
) -> PauseStep:
    """Pause the guest while the resident has no budget; `ahead_s` is how long it takes until the next look.

    `guest_first`: the resident is not what its profile says and the guest is, so the guest's promise comes first: it
    is paused only as long as its own budget lasts.
    """
    room_s = min(pauses.room_s, guest.budget_s) if guest_first else pauses.room_s
    if pauses.since_s is None:
        can = pauses.ran_s >= REST_S and room_s > ahead_s
        return PauseStep.PAUSE if can and resident.breaks_within(ahead_s) else PauseStep.LEAVE
    if now_s - pauses.since_s + ahead_s > LONGEST_PAUSE_S or room_s <= ahead_s:
        return PauseStep.END
    return PauseStep.RESUME if resident.affords(REST_S) else PauseStep.LEAVE
