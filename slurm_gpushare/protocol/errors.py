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


class NotInstalled(GpushareError):
    """Part of the package that this machine was not set up for."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"the Python module '{module}' is not installed here",
            f"This needs {_PACKAGED.get(extra, '')}a virtual environment with: pip install 'slurm-gpushare[{extra}]'.",
        )


_PACKAGED = dict.fromkeys(("controller", "mariadb"), "the package slurm-gpushare-controller, or ")
"""What that package brings; packaging/build.py has its list."""


EXTRA_OF = {
    "numpy": "controller", "scipy": "controller", "sklearn": "controller", "sqlalchemy": "controller",
    "jinja2": "controller", "pymysql": "mariadb", "matplotlib": "plots",
}  # fmt: skip
"""The extra of setup.cfg that brings a module: a compute or login node has none of them."""


class ConfigError(BadInput):
    """gpushare.conf cannot be used as it is written."""


class SlurmError(GpushareError):
    """A Slurm command failed."""
