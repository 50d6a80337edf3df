"""Ingest as the helper and ``gpushare ingest`` run it: the store's, with tokens from Slurm's tags."""

from __future__ import annotations

from slurm_gpushare.config import Config
from slurm_gpushare.errors import ConfigError
from slurm_gpushare.slurm.job_tokens import JobTokens
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.telemetry.record import gpu_model
from slurm_gpushare.users import uid_of


def make_ingest(config: Config, store: Store, tags: JobTokens) -> Ingest:
    """Takes records from the site's spool directory into `store`."""
    return Ingest(
        store,
        config.spool_dir,
        opener(config.munge_socket),
        tags.resolve,
        node_uids=[_uid(name) for name in config.node_users],
        gpu_models=[model for name in config.gpu_models if (model := gpu_model(name))],
    )


def _uid(name: str) -> int:
    uid = uid_of(name)
    if uid is None:
        raise ConfigError(f"NodeUsers: there is no user '{name}'")
    return uid
