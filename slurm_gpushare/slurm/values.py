"""The ways in which Slurm writes numbers, times and the absence of both."""

from __future__ import annotations

import re

ABSENT = frozenset({"", "(null)", "N/A", "None", "NONE", "Unknown", "UNLIMITED", "Partition_Limit", "NOT_SET", "n/a"})
_UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)[cn]?")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)(?:\.\d+)?")


def text(value: str) -> str:
    """The value, or the empty string where Slurm says in one of its ways that there is none."""
    value = value.strip()
    return "" if value in ABSENT else value


def integer(value: str) -> int | None:
    """A whole number, or None."""
    value = value.strip()
    return int(value) if value.isascii() and value.isdecimal() else None


def memory_mib(value: str) -> int | None:
    """``100M``, ``62.50G``, ``2000`` (Slurm's plain numbers are MiB) -> MiB."""
    found = _MEMORY.fullmatch(value.strip())
    return round(float(found[1]) * _UNITS_MIB[found[2] or "M"]) if found else None


def duration_s(value: str) -> int | None:
    """``1-02:00:00``, ``5:00``, ``30`` (seconds) -> seconds; None for UNLIMITED and the like."""
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = found.groups()
    if hours is not None and minutes is None:
        hours, minutes = None, hours
    return ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes or 0)) * 60 + int(seconds)


def tres(value: str) -> dict[str, str]:
    """``cpu=1,mem=100M,gres/shard=1`` -> {"cpu": "1", ...}."""
    return dict(part.split("=", 1) for part in text(value).split(",") if "=" in part)


def pairs(line: str) -> dict[str, str]:
    """``Key=Value Key=Value`` of ``scontrol show ... -o``, for entities whose values hold no spaces."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
