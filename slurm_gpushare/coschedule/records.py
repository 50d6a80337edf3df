"""Ingest as the helper and ``gpushare ingest`` run it: the store's, with tokens from Slurm's tags."""

from __future__ import annotations

import pwd
from collections.abc import Collection, Mapping

from slurm_gpushare.config import Config
from slurm_gpushare.errors import ConfigError
from slurm_gpushare.slurm.tags import JobTags
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.tags import JobTag
from slurm_gpushare.telemetry.record import gpu_model


def make_ingest(config: Config, store: Store, tags: JobTags) -> Ingest:
    """Takes records from the site's spool directory into `store`."""

    def job_tags(job_ids: Collection[int]) -> Mapping[int, JobTag]:
        found = tags.resolve(job_ids)
        return {job: JobTag(item.tag.token if item.tag else None, item.uid) for job, item in found.items()}

    model = gpu_model(config.gpu_model)
    return Ingest(
        store,
        config.spool_dir,
        opener(config.munge_socket),
        job_tags,
        node_uids=[_uid(name) for name in config.node_users],
        gpu_models=[model] if model else [],
    )


def _uid(name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(f"NodeUsers: there is no user '{name}'") from None
