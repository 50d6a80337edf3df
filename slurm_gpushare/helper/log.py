"""One line an event, ``event=place job=14 gpu=n1:2``: easy to read, easy to grep, easy to parse."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
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


# What may happen to hundreds of jobs at once: one line of each kind a tick, with counts in place of copies.


_NOTED: dict[tuple[str, str], list[dict[str, Any]]] = {}
_FEW = 4
"""So many different values are counted one by one; of more only that they differ is known."""
_NAMED = 8


def noted(event: str, **fields: Any) -> None:
    """As `info`, together with the others of its event and outcome at the next `flush`; each by itself for -v."""
    LOGGER.debug("%s", line(event, **fields))
    _NOTED.setdefault((event, str(fields.get("outcome", ""))), []).append(fields)


def flush() -> None:
    """Write what was noted. A single event is written as it is."""
    noted_now = list(_NOTED.items())
    _NOTED.clear()
    for (event, _), lines in noted_now:
        if len(lines) == 1:
            info(event, **lines[0])
            continue
        names = dict.fromkeys(name for fields in lines for name in fields if name != "job")
        values = {name: Counter(str(f[name]) for f in lines if f.get(name) is not None) for name in names}
        counted = {name: _counts(found) for name, found in values.items() if 0 < len(found) <= _FEW}
        jobs = [str(fields["job"]) for fields in lines if "job" in fields]
        more = ",..." if len(jobs) > _NAMED else ""
        info(event, count=len(lines), **counted, jobs=",".join(jobs[:_NAMED]) + more if jobs else None)


def _counts(found: Counter[str]) -> str:
    """``alone:3,beside:5``; the value alone where there is one."""
    return next(iter(found)) if len(found) == 1 else ",".join(f"{value}:{count}" for value, count in found.items())


# Work beside the ticks must not slow them.


_NICENESS = 10


def lower_priority() -> None:
    """Of the calling thread alone. A unit or a container may forbid it, and the work is done all the same."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
