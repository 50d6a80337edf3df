"""``gpushare doctor``: is everything set up right, and if not, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from slurm_gpushare.cli.console import JSON, echo_json, styled
from slurm_gpushare.protocol.errors import Exit
from slurm_gpushare.site.doctor import examine, examine_first_time
from slurm_gpushare.site.finding import Finding, Level

_COLOURS = {Level.PASS: "green", Level.LATER: "cyan", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@click.option("--first-time", is_flag=True, help="The helper has never run: do not fail for what it makes itself.")
@JSON
@click.pass_context
def doctor(ctx: click.Context, first_time: bool, as_json: bool) -> None:
    """Check the set-up, each line with its fix.

    Run it on the controller as SlurmUser, and on a compute node as root. Exit code 3 if a check fails. On the
    controller it submits one held job with our word, looks what slurmctld made of it, and cancels it.
    """
    found = list(examine_first_time() if first_time else examine())
    say(found, as_json)
    ctx.exit(Exit.PROBLEMS if any(finding.level is Level.FAIL for finding in found) else Exit.OK)


def say(found: Sequence[Finding], as_json: bool) -> None:
    """Print findings, each with its fix, and how many there are."""
    if as_json:
        echo_json([asdict(finding) for finding in found])
        return
    for finding in found:
        level = styled(finding.level.value.ljust(5), _COLOURS[finding.level])
        click.echo(f"{level} {finding.check}: {finding.found}")
        if finding.fix:
            click.echo(f"      {finding.fix}")
    levels = [finding.level for finding in found]
    failures, warnings = levels.count(Level.FAIL), levels.count(Level.WARN)
    click.echo(f"{len(found)} checks: {failures} failed, {warnings} warnings")
