"""Numbers on a page: never torn apart from their units at the end of a line."""

from __future__ import annotations

from slurm_gpushare.helper.reasons import duration_text
from slurm_gpushare.report import words


def duration(seconds: float | None) -> str:
    return _unbroken(duration_text(seconds))


def hours(value: float | None) -> str:
    return _unbroken(words.hours(value))


def per_cent(value: float | None) -> str:
    return _unbroken(words.per_cent(value))


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")
