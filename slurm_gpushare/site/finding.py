"""What a check of doctor's says, and how a check is written: it yields what is wrong, or nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

WRITE = "Run 'gpushare configure --write'."
LINE = "Run 'gpushare configure' for the line."


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


def passed(found: str, check: str = "") -> Finding:
    """All is well; `check` is the name of the check that says so, as in the next two."""
    return Finding(check, Level.PASS, found)


def warned(found: str, fix: str, check: str = "") -> Finding:
    """Something is lost, or will fail for some jobs."""
    return Finding(check, Level.WARN, found, fix)


def failed(found: str, fix: str, check: str = "") -> Finding:
    """Sharing does not work, or is unfair."""
    return Finding(check, Level.FAIL, found, fix)


Check = Callable[..., Iterable[Finding]]


def check(name: str, well: str = "") -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., list[Finding]]]:
    """A check called `name`: its findings get that name unless they have one, and where there is none it says `well`.

    Without `well` a check that finds nothing says nothing, since it does not apply.
    """

    def named(look: Callable[..., Iterator[Finding]]) -> Callable[..., list[Finding]]:
        @functools.wraps(look)
        def run(*known: object) -> list[Finding]:
            found = [replace(item, check=item.check or name) for item in look(*known)]
            return found or ([passed(well, name)] if well else [])

        return run

    return named
