"""Cards that administrators keep out of sharing (``gpushare off``): one document in the store, read every tick."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from slurm_gpushare.store.store import Store

_DOCUMENT = "off"


@dataclass(frozen=True, slots=True, order=True)
class OffCard:
    """A card on which nobody is put beside anybody until it is on again."""

    node: str
    gpu: int
    why: str
    """In the administrator's words, for `gpushare status`; may be empty."""
    since_s: int


def off_cards(store: Store) -> list[OffCard]:
    """All of them, by node and index."""
    found = store.knowledge.get(_DOCUMENT) or {}
    return sorted(OffCard(**card) for card in found.get("cards", ()))


def keep_off(store: Store, cards: Iterable[OffCard]) -> None:
    """Let these be the cards that are off, in place of those that were."""
    store.knowledge.put({_DOCUMENT: {"cards": [asdict(card) for card in cards]}})
