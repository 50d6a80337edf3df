"""What this user may read: settings where there are any, the store where it is theirs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slurm_gpushare.cli.output import warn
from slurm_gpushare.config import Config, load_config
from slurm_gpushare.errors import ConfigError, GpushareError

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store


def config_or_defaults() -> Config | None:
    """The settings; a warning and None where there are none to read."""
    try:
        return load_config()
    except ConfigError as error:
        warn(f"{error} The defaults are used.")
        return None


def readable_store(config: Config | None, *, loud: bool = True) -> Store | None:
    """The store for reading, or None: users have no access to it, and need none.

    The database library is imported only where there is something to open: commands answer at once without it.
    """
    if config is None:
        return None
    path = config.store_url.removeprefix("sqlite://")
    if path != config.store_url and os.path.exists(path) and not os.access(path, os.R_OK):
        return None
    if path != config.store_url and not os.path.exists(path) and not loud:
        return None
    from slurm_gpushare.store.store import Store

    try:
        return Store(config.store_url, read_only=True)
    except GpushareError as error:
        if loud:
            warn(f"{error} Only what Slurm knows is shown.")
        return None
