"""Whether sharing is what was promised: a pure judgement of what was measured, over the run as it is."""

from __future__ import annotations

from dataclasses import dataclass

SURE = 1.645
"""Standard deviations: 95 % sure that it is no better than this."""
NEARLY_SURE = 0.75
"""Of a promise that is about to be broken, so much must have been lost for sure before anything is done."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands with its promise."""

    promise_pct: float
    run_s: float
    """Alone-time of its whole run if that is short, and at least what it has done."""
    lost_s: float = 0.0
    """To neighbours and to pauses."""
    shared_s: float = 0.0
    """Of its run, the time beside its present neighbour."""
    loss: float = 0.0
    """What each second beside its present neighbour costs it, as measured."""
    error: float = 0.0
    """How far that may be off (one standard deviation)."""
    measured: bool = True

    @property
    def promised_s(self) -> float:
        return self.promise_pct / 100.0 * self.run_s

    @property
    def budget_s(self) -> float:
        """Delay that the promise still leaves."""
        return self.promised_s - self.lost_s

    @property
    def slowed_pct(self) -> float:
        """Of its run."""
        return 100.0 * self.lost_s / self.run_s if self.run_s > 0 else 0.0

    @property
    def _surely_lost_s(self) -> float:
        return self.lost_s - SURE * self.error * self.shared_s

    @property
    def broken(self) -> bool:
        """Whether its promise is broken, beyond reasonable doubt."""
        return self.measured and self._surely_lost_s > self.promised_s

    def breaks_within(self, ahead_s: float) -> bool:
        """Whether its promise is about to be broken if both go on for `ahead_s`."""
        near = self.budget_s <= self.loss * ahead_s and self.loss > SURE * self.error
        return self.measured and near and self._surely_lost_s >= NEARLY_SURE * self.promised_s - self.loss * ahead_s

    def affords(self, ahead_s: float) -> bool:
        """Whether both could go on for `ahead_s` within its promise."""
        return self.budget_s >= self.loss * ahead_s
