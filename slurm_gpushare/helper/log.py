"""One line an event, ``event=place job=14 gpu=n1:2``: easy to read, easy to grep, easy to parse."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Any

LOGGER = logging.getLogger("gpushare")
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;/_+-%[]()")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    if text and set(text) <= _PLAIN:
        return text
    # Names of files and answers of Slurm may hold what a terminal would obey.
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def line(event: str, **fields: Any) -> str:
    """The event and those of its fields that have a value."""
    return " ".join(
        [f"event={event}", *(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)]
    )


def info(event: str, **fields: Any) -> None:
    LOGGER.info("%s", line(event, **fields))


def warning(event: str, **fields: Any) -> None:
    LOGGER.warning("%s", line(event, **fields))


# Work beside the ticks must not slow them.


_NICENESS = 10


def lower_priority() -> None:
    """Of the calling thread alone. A unit or a container may forbid it, and the work is done all the same."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
