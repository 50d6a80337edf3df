"""The one family of exceptions that reaches a person, each with a next step."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every gpushare command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    PROBLEMS = 3  # a check (doctor, db check) ran well and found something


class GpushareError(Exception):
    """Something failed that a person can act on.

    Printed as ``gpushare: error: WHAT. HINT``; `what` names the thing and why it failed
    (``/etc/slurm/gpushare.conf:7: unknown key 'Leese'``), `hint` says what to do about it.
    """

    exit_code: Exit = Exit.FAILURE

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what.rstrip(".")
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}. {self.hint}" if self.hint else self.what


class BadInput(GpushareError):
    """The caller gave something unusable: a bad option, file or value. Exit code 2."""

    exit_code = Exit.USAGE


class ConfigError(BadInput):
    """gpushare.conf cannot be used as it is written."""
