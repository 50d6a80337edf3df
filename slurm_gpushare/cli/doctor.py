"""``gpushare doctor``: is everything set up right, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict

import click

from slurm_gpushare.cli.output import echo_json, styled
from slurm_gpushare.errors import Exit
from slurm_gpushare.site.doctor import examine
from slurm_gpushare.site.finding import Level

_COLOURS = {Level.PASS: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the set-up, each line with its fix.

    Run it on the controller as SlurmUser, and on a compute node as root. Exit code 3 if a check fails.
    """
    found = []
    for finding in examine():
        found.append(finding)
        if not as_json:
            click.echo(f"{styled(finding.level.value, _COLOURS[finding.level])}  {finding.check}: {finding.found}")
            if finding.fix:
                click.echo(f"      {finding.fix}")
    failures = sum(finding.level is Level.FAIL for finding in found)
    if as_json:
        echo_json([asdict(finding) for finding in found])
    else:
        warnings = sum(finding.level is Level.WARN for finding in found)
        click.echo(f"{len(found)} checks: {failures} failed, {warnings} warnings")
    ctx.exit(Exit.PROBLEMS if failures else Exit.OK)
