"""The controller's memory: workloads, profiles, models, knowledge, decisions, observations. All SQL is here."""

from slurm_gpushare.store.database import StoreError
from slurm_gpushare.store.store import Store

__all__ = ["Store", "StoreError"]
