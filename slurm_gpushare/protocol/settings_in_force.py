"""The last good settings: what stays in force while gpushare.conf is broken or away.

The helper and the samplers keep a copy of each gpushare.conf that they could read. Commands, the hook
(lua_bridge/gpushare_site.lua) and the prolog (prolog/common.sh) read the same copy; its first line says of which file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slurm_gpushare.protocol.errors import ConfigError
from slurm_gpushare.protocol.files import hand_over, replace_text
from slurm_gpushare.protocol.settings import Config, config_path, load_config, parse_config, settings_text

DEFAULT_PATH = Path("/var/lib/gpushare/gpushare.conf.good")
_HEADING = "# last good settings of "
_LOG = logging.getLogger("gpushare")


def last_good_path() -> Path:
    """``GPUSHARE_LAST_GOOD``, else its usual place."""
    return Path(os.environ.get("GPUSHARE_LAST_GOOD") or DEFAULT_PATH)


def settings_in_force() -> Config:
    """gpushare.conf, which is then remembered; else the last good settings, and a line in the log that says so."""
    config, fault = settings_and_fault()
    if fault is None:
        remember(config)
    else:
        _LOG.warning('event=settings error="%s" message="the last good settings stay in force"', fault.what)
    return config


def settings_and_fault() -> tuple[Config, ConfigError | None]:
    """gpushare.conf; else the last good settings, and what is wrong with the file. ConfigError if there are neither."""
    path = config_path()
    try:
        return load_config(path), None
    except ConfigError as fault:
        return _recall(path, fault), fault


def remember(config: Config) -> None:
    """Keep a copy of the file that `config` was read from, if this process may; never raises."""
    if config.source is None:
        return
    path = last_good_path()
    try:
        text = f"{_HEADING}{config.source}\n{settings_text(config.source)}"
        parse_config(text, config.source)  # the file may have changed since it was read
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return
        for warning in config.warnings:
            _LOG.warning('event=settings warning="%s"', warning)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_text(path, text, config.source.stat().st_mode & 0o644)  # it may hold the database's password
        hand_over(path)
    except (OSError, UnicodeDecodeError, ConfigError) as why:
        _LOG.debug("event=settings error=%s message='no copy kept'", why)


def _recall(path: Path, fault: ConfigError) -> Config:
    """The last good settings of `path`; ConfigError, about its own `fault`, where there are none."""
    copy = last_good_path()
    try:
        text = copy.read_text(encoding="utf-8")
        if text.partition("\n")[0] == f"{_HEADING}{path}":
            return parse_config(text, path)
    except PermissionError:
        hint = (
            f"The last good settings ({copy}) are not yours to read: tell an administrator, or run this as SlurmUser."
        )
        raise ConfigError(fault.what, hint) from fault
    except (OSError, UnicodeDecodeError, ConfigError) as why:
        _LOG.debug("event=settings error=%s message='no last good settings'", why)
    raise fault
