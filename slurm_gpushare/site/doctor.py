"""Run every check; one that cannot run says so instead of hiding the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slurm_gpushare.protocol.errors import EXTRA_OF, ConfigError, NotInstalled, SlurmError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.site.current_setup import collect
from slurm_gpushare.site.finding import Check, Finding, Level, failed, passed, warned
from slurm_gpushare.site.local_checks import CONTROLLER_CHECKS, LOCAL_CHECKS
from slurm_gpushare.site.owner_checks import OWNER_CHECKS, helpers_directories, script_owners
from slurm_gpushare.site.script_checks import HOOK_CHECKS, PROLOG_CHECKS, tag_of_a_job
from slurm_gpushare.site.slurm_checks import SLURM_CHECKS
from slurm_gpushare.site.units import installed_units
from slurm_gpushare.slurm.commands import connect

_OF_THE_HELPER = frozenset({"hook-file", "heartbeat", "hold-board"})
"""What only the helper makes, at its first start."""
SITE_CHECKS: tuple[Check, ...] = (
    *SLURM_CHECKS, *HOOK_CHECKS, *PROLOG_CHECKS, script_owners, installed_units, tag_of_a_job,
)  # fmt: skip
MACHINE_CHECKS: tuple[Check, ...] = (*LOCAL_CHECKS, *OWNER_CHECKS)
CONTROLLERS = frozenset({tag_of_a_job, helpers_directories, *CONTROLLER_CHECKS})
"""Checks of what only the controller has."""


def examine_first_time() -> Iterator[Finding]:
    """All findings on a site where the helper has never run: what it will make itself is said to come later."""
    for finding in examine():
        if finding.level is not Level.PASS and finding.check in _OF_THE_HELPER:
            yield replace(finding, level=Level.LATER, fix="Comes with the helper's first start.")
        else:
            yield finding


def examine() -> Iterator[Finding]:
    """All findings, in the order in which to fix them."""
    try:
        config = load_config()
    except ConfigError as error:
        yield failed(error.what, error.hint, "gpushare.conf")
        return
    yield passed(f"{config.source}", "gpushare.conf")
    here = True  # as long as Slurm does not say
    try:
        facts = collect(connect())
    except SlurmError as error:
        yield failed(error.what, error.hint, "slurm")
    else:
        here = facts.is_controller
        if not here:
            yield passed("slurmctld does not run here: what it alone needs is not checked", "machine")
        for check in SITE_CHECKS:
            if here or check not in CONTROLLERS:
                yield from _run(check, facts, config)
    for check in MACHINE_CHECKS:
        if here or check not in CONTROLLERS:
            yield from _run(check, config)


def _run(check: Check, *known: object) -> Iterator[Finding]:
    name = getattr(check, "__name__", "check").replace("_", "-")
    try:
        yield from check(*known)
    except PermissionError as why:
        yield warned(f"{why.filename} is not yours to see", "Run doctor as SlurmUser or root.", name)
    except ModuleNotFoundError as error:
        missing = NotInstalled(error.name or "", EXTRA_OF.get(error.name or "", "controller"))
        yield warned(missing.what, missing.hint, name)
