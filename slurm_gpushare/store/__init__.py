"""The controller's memory: workloads, profiles, models, knowledge, decisions, observations. All SQL is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_gpushare.protocol.errors import GpushareError

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store

__all__ = ["Store", "StoreDamaged", "StoreError", "StoreReplaced"]


def __getattr__(name: str) -> Any:
    """Import the database library only where it is used: a login node has none, and reads what was published."""
    if name == "Store":
        from slurm_gpushare.store.store import Store

        return Store
    raise AttributeError(name)


class StoreError(GpushareError):
    """The store cannot be used; the message says which one and why."""


class StoreReplaced(StoreError):
    """The store's file was deleted, or another one took its place: what was read from it no longer counts."""


class StoreDamaged(StoreError):
    """The store's file is not what SQLite wrote: only a copy of it helps."""
