"""What this user may read: the settings in force, and the store or what the helper published."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slurm_gpushare.cli.output import warn
from slurm_gpushare.protocol.errors import ConfigError, GpushareError, NotInstalled
from slurm_gpushare.protocol.settings import DEFAULTS, Config
from slurm_gpushare.protocol.settings_in_force import settings_and_fault
from slurm_gpushare.report.sources import PublishedSource, Source, StoreSource

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store


def source(config: Config, *, loud: bool = False) -> Source:
    """Where this user's figures come from."""
    store = readable_store(config, loud=loud)
    if store is not None:
        return StoreSource(store, config.public_dir)
    return PublishedSource(config.public_dir, os.geteuid(), config.munge_socket)


def settings() -> Config:
    """The settings in force. While gpushare.conf has a mistake or is away: the last good ones, and a warning."""
    config, fault = settings_and_fault()
    if fault is not None:
        warn(f"{fault.what}. The last good settings stay in force until it is mended; 'gpushare doctor' checks it.")
    return config


def settings_or_defaults(*, loud: bool = True) -> Config:
    """The same for commands that only show something: where there are none, the defaults, and a warning if `loud`."""
    try:
        return settings()
    except ConfigError as error:
        if loud:
            warn(f"{error} The defaults are used.")
        return DEFAULTS


def _is_absent(path: str) -> bool:
    """Whether there is no such file, which is worth a word; one that is closed to this user is as it should be."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def readable_store(config: Config, *, loud: bool = True) -> Store | None:
    """The store for reading, or None: users have no access to it, and need none.

    The database library is imported only where there is something to open: commands answer at once without it. Who
    was told already that the defaults are used is not told that nothing is there.
    """
    loud = loud and config.source is not None
    path = config.store_url.removeprefix("sqlite://")
    if path != config.store_url and not os.access(path, os.R_OK) and not (loud and _is_absent(path)):
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
