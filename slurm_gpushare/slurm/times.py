"""Instants as people write them for squeue's and sacct's -S and -E."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from slurm_gpushare.errors import BadInput

_RELATIVE = re.compile(r"now(?:([+-])(\d+)(seconds?|minutes?|hours?|days?|weeks?)?)?")
# What each form leaves unsaid comes from today.
_FORMS = (
    (re.compile(r"\d{4}-\d\d-\d\d"), "%Y-%m-%d"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d"), "%Y-%m-%dT%H:%M"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"), "%Y-%m-%dT%H:%M:%S"),
    (re.compile(r"\d{6}"), "%m%d%y"),
    (re.compile(r"\d\d/\d\d/\d\d"), "%m/%d/%y"),
)
_YEARLESS = ((re.compile(r"\d{4}"), "%m%d"), (re.compile(r"\d\d/\d\d"), "%m/%d"))
_DATELESS = ((re.compile(r"\d\d:\d\d"), "%H:%M"), (re.compile(r"\d\d:\d\d:\d\d"), "%H:%M:%S"))


def _read(word: str, forms: Sequence[tuple[re.Pattern[str], str]]) -> datetime | None:
    for pattern, form in forms:
        if pattern.fullmatch(word):
            try:
                return datetime.strptime(word.replace(" ", "T"), form)
            except ValueError:
                return None
    return None


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """The local time that `text` means, in the forms that sacct(1) lists; BadInput for any other."""
    now = now or datetime.now()
    word = text.strip()
    lowered = word.lower()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    words = {
        "today": midnight,
        "midnight": midnight,
        "noon": midnight.replace(hour=12),
        "teatime": midnight.replace(hour=16),
    }
    if lowered in words:
        return words[lowered]
    if relative := _RELATIVE.fullmatch(lowered):
        sign, amount, unit = relative.groups()
        name = (unit or "seconds").rstrip("s") + "s"
        delta = timedelta(**{name: int(amount or 0)})
        return now - delta if sign == "-" else now + delta
    if found := _read(word, _FORMS):
        return found
    if found := _read(word, _YEARLESS):
        return found.replace(year=now.year)
    if found := _read(word, _DATELESS):
        return midnight.replace(hour=found.hour, minute=found.minute, second=found.second)
    raise BadInput(f"'{text}' is not a time", "Write YYYY-MM-DD[THH:MM[:SS]], HH:MM, MM/DD, today or now-7days.")
