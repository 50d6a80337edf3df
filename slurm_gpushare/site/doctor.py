"""Run every check; one that cannot run says so instead of hiding the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from slurm_gpushare.protocol.errors import EXTRA_OF, ConfigError, NotInstalled, SlurmError
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.site.current_setup import collect
from slurm_gpushare.site.finding import Finding, Level, failed, passed, warned
from slurm_gpushare.site.hold_checks import hold_board, hold_setup
from slurm_gpushare.site.local_checks import CONTROLLER_CHECKS, LOCAL_CHECKS
from slurm_gpushare.site.owner_checks import file_owners, helpers_directories, incoming_mode, script_owners
from slurm_gpushare.site.script_checks import installed_units
from slurm_gpushare.site.slurm_checks import SLURM_CHECKS
from slurm_gpushare.slurm.interface import connect

# What only the helper makes, at its first start.
_OF_THE_HELPER = frozenset({"hook-file", "heartbeat", "hold-board"})


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
        yield failed("gpushare.conf", error.what, error.hint)
        return
    yield passed("gpushare.conf", f"{config.source}")
    here = True  # as long as Slurm does not say
    try:
        facts = collect(connect())
    except SlurmError as error:
        yield failed("slurm", error.what, error.hint)
    else:
        here = facts.is_controller
        if not here:
            yield passed("machine", "slurmctld does not run here: what it alone needs is not checked")
        for check in (*SLURM_CHECKS, hold_setup, script_owners, installed_units):
            yield from _run(check, facts, config)
    for local in (*LOCAL_CHECKS, hold_board, file_owners, incoming_mode, helpers_directories):
        if here or local not in (*CONTROLLER_CHECKS, helpers_directories):
            yield from _run(local, config)


def _run(check: Callable[..., Iterable[Finding]], *known: object) -> Iterator[Finding]:
    name = check.__name__.replace("_", "-")
    try:
        yield from check(*known)
    except PermissionError as why:
        yield warned(name, f"{why.filename} is not yours to see", "Run doctor as SlurmUser or root.")
    except ModuleNotFoundError as error:
        missing = NotInstalled(error.name or "", EXTRA_OF.get(error.name or "", "controller"))
        yield warned(name, missing.what, missing.hint)
