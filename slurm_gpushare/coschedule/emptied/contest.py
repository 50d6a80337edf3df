"""Who got the cards that became empty while the next job in the queue was one of ours: we, or Slurm by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from slurm_gpushare.coschedule.view.occupancy import CardUse, GpuAddress, placed_card
from slurm_gpushare.slurm.queue import Job


class Contest:
    """Counts cards won and lost. A card that we gave to a job is open until that job, or another, has started there."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[GpuAddress, float]] = {}
        self._counts: Counter[str] = Counter()

    def given(self, key: str, card: GpuAddress) -> None:
        """An empty card goes to the job `key`; whether it gets it is seen later."""
        self._open[key] = card, time.monotonic()

    def lost(self) -> None:
        """Slurm started a job of ours by itself on a card that we were about to give it."""
        self._counts["cards_lost"] += 1

    def held(self, milliseconds: int) -> None:
        """A card was kept for so long until we answered."""
        self._counts["holds"] += 1
        self._counts["hold_ms"] += milliseconds

    def ended(self, key: str) -> None:
        """The job ended, so it had started: on the one card that its request named."""
        if self._open.pop(key, None) is not None:
            self._counts["cards_won"] += 1

    def settle(self, jobs: Mapping[str, Job], cards: Mapping[GpuAddress, CardUse], asked_s: float) -> None:
        """Look who is on the cards. Slurm was asked at `asked_s` (monotonic clock): what we did since is not in it."""
        for key, (card, given_s) in list(self._open.items()):
            if given_s >= asked_s:
                continue
            job = jobs.get(key)
            if job is not None and job.running:
                self.ended(key)
            elif job is None:
                del self._open[key]  # cancelled before it started; or it ended, which `ended` was told
            elif placed_card(job) != card or _taken(cards.get(card)):
                del self._open[key]
                self.lost()

    def drain(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self._counts = dict(self._counts), Counter()
        return counts


def _taken(use: CardUse | None) -> bool:
    """Whether somebody whom we did not send is on the card."""
    return use is not None and any(
        share.job.state != "COMPLETING" and not (share.job.tag and share.job.tag.placed) for share in use.occupants
    )
