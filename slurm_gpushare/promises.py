"""The promise of a job: the most that sharing may slow it. The only place that says what it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SitePromises:
    """What the site promises, in per cent of a job's run alone."""

    resident_pct: float
    """``ResidentBudget``: who was on the card first, or came to have it after who is there (a successor)."""
    guest_pct: float
    """``GuestCap``: who joined, for all of its run, also when it is alone by then."""

    def of(self, *, guest: bool, own_pct: float | None) -> float:
        """The promise of one job; its owner may have asked for less than the site promises (``max=``)."""
        site = self.guest_pct if guest else self.resident_pct
        return site if own_pct is None else min(site, float(own_pct))
