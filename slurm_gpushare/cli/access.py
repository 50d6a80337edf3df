"""What this user may read: gpushare.conf, and the store or what the helper published."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slurm_gpushare.cli.output import warn
from slurm_gpushare.config import DEFAULTS, Config, load_config
from slurm_gpushare.errors import ConfigError, GpushareError, NotInstalled
from slurm_gpushare.report.sources import PublishedSource, Source, StoreSource

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store


def source(config: Config, *, loud: bool = False) -> Source:
    """Where this user's figures come from."""
    store = readable_store(config, loud=loud)
    if store is not None:
        return StoreSource(store, config.public_dir)
    return PublishedSource(config.public_dir, os.geteuid(), config.munge_socket)


def config_or_defaults(*, loud: bool = True) -> Config:
    """The settings; the defaults, and a warning if `loud`, where there are none to read."""
    try:
        return load_config()
    except ConfigError as error:
        if loud:
            warn(f"{error} The defaults are used.")
        return DEFAULTS


def readable_store(config: Config, *, loud: bool = True) -> Store | None:
    """The store for reading, or None: users have no access to it, and need none.

    The database library is imported only where there is something to open: commands answer at once without it. Who
    was told already that the defaults are used is not told that nothing is there.
    """
    loud = loud and config.source is not None
    path = config.store_url.removeprefix("sqlite://")
    if path != config.store_url and os.path.exists(path) and not os.access(path, os.R_OK):
        return None
    if path != config.store_url and not os.path.exists(path) and not loud:
        return None
    try:
        from slurm_gpushare.store.store import Store

        return Store(config.store_url, read_only=True)
    except ModuleNotFoundError as missing:
        if loud:
            warn(f"{NotInstalled(missing.name or '', 'controller')} What the helper published is shown.")
        return None
    except GpushareError as error:
        if loud:
            warn(f"{error} What the helper published is shown.")
        return None
