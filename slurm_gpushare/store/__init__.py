"""The controller's memory: workloads, profiles, models, knowledge, decisions, observations. All SQL is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store

__all__ = ["Store"]


def __getattr__(name: str) -> Any:
    """Import the database library only where it is used: a login node has none, and reads what was published."""
    if name == "Store":
        from slurm_gpushare.store.store import Store

        return Store
    raise AttributeError(name)
