"""Run every check; one that cannot run says so instead of hiding the others."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_gpushare.config import load_config
from slurm_gpushare.errors import ConfigError
from slurm_gpushare.site.facts import collect
from slurm_gpushare.site.finding import Finding, failed, passed
from slurm_gpushare.site.local_checks import LOCAL_CHECKS
from slurm_gpushare.site.slurm_checks import SLURM_CHECKS
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import connect


def examine() -> Iterator[Finding]:
    """All findings, in the order in which to fix them."""
    try:
        config = load_config()
    except ConfigError as error:
        yield failed("gpushare.conf", error.what, error.hint)
        return
    yield passed("gpushare.conf", f"{config.source}")
    try:
        facts = collect(connect())
    except SlurmError as error:
        yield failed("slurm", error.what, error.hint)
    else:
        for check in SLURM_CHECKS:
            yield from check(facts, config)
    for local in LOCAL_CHECKS:
        yield from local(config)
