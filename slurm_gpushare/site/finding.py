"""What a check of doctor's says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    PASS = "pass"
    LATER = "later"  # cannot be right before the helper's first start
    WARN = "warn"  # works, but something is lost or will fail for some jobs
    FAIL = "fail"  # sharing does not work, or is unfair, until this is fixed


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of doctor's: what was checked, what was found, and what to do about it."""

    check: str
    level: Level
    found: str
    fix: str = ""


def passed(check: str, found: str) -> Finding:
    return Finding(check, Level.PASS, found)


def warned(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Level.WARN, found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Level.FAIL, found, fix)
