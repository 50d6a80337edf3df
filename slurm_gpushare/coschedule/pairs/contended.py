"""Can a neighbour have cost a job what it lost? Only as far as the card was busy.

A job that does less than alone while the card has time to spare waits for something else, or idles on purpose: its
neighbour must not pay for that.
"""

from __future__ import annotations

CARD = "card_util_pct"
"""How busy the whole card was, in the job's own record."""
BUSY_PCT = 80.0
"""On a card as busy as this any loss is believed; on one half as busy, half of a job's speed."""
NEAR = 1.25
"""A loss up to so many times the predicted one is no surprise and needs no busy card."""
SLICING = 0.05
"""What any neighbour may cost beyond that: the card changes between the two."""


def is_believed(rate: float, expected: float, card_pct: float | None) -> bool:
    """Whether a rate as low as this can be the neighbour's doing. A card that tells nothing is no proof against it."""
    if card_pct is None:
        return True
    return 1.0 - rate <= max(card_pct / BUSY_PCT, NEAR * (1.0 - min(1.0, expected))) + SLICING
