"""``gpushare doctor``: is everything set up right, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict

import click

from slurm_gpushare.cli.options import JSON
from slurm_gpushare.cli.output import echo_json, styled
from slurm_gpushare.protocol.errors import Exit
from slurm_gpushare.site.doctor import examine, examine_first_time
from slurm_gpushare.site.finding import Level
from slurm_gpushare.site.request_forms import try_all

_COLOURS = {Level.PASS: "green", Level.LATER: "cyan", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@click.option("--first-time", is_flag=True, help="The helper has never run: do not fail for what it makes itself.")
@click.option("--end-to-end", is_flag=True,
              help="Submit real, short jobs in every way to ask for GPUs, and say what their user sees.")  # fmt: skip
@click.option("--brief", is_flag=True, help="With --end-to-end: only the forms that stand for all.")
@click.option("-p", "--partition", metavar="NAME", help="With --end-to-end: submit here; by default the first of ours.")
@click.option("-A", "--account", metavar="NAME", help="With --end-to-end: submit under this account.")
@click.option(
    "--wait", "wait_s", default=300.0, show_default=True, metavar="SECONDS",
    help="With --end-to-end: longest time to wait for GPUs. Jobs that wait longer are cancelled.",
)  # fmt: skip
@JSON
@click.pass_context
def doctor(
    ctx: click.Context, first_time: bool, end_to_end: bool, brief: bool, partition: str | None, account: str | None,
    wait_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Check the set-up, each line with its fix.

    Run it on the controller as SlurmUser, and on a compute node as root. Exit code 3 if a check fails.

    With --end-to-end run it as an ordinary user on a login node, in a directory that the nodes see too: it submits
    about fifty jobs of a second each, for up to two GPUs on up to two nodes, and changes nothing else. A job without a
    token must get what plain Slurm gives it.
    """
    if end_to_end:
        found = list(try_all(partition, account, wait_s, brief))
    else:
        found = list(examine_first_time() if first_time else examine())
    failures = sum(finding.level is Level.FAIL for finding in found)
    if as_json:
        echo_json([asdict(finding) for finding in found])
    else:
        for finding in found:
            level = styled(finding.level.value.ljust(5), _COLOURS[finding.level])
            click.echo(f"{level} {finding.check}: {finding.found}")
            if finding.fix:
                click.echo(f"      {finding.fix}")
        warnings = sum(finding.level is Level.WARN for finding in found)
        click.echo(f"{len(found)} checks: {failures} failed, {warnings} warnings")
    ctx.exit(Exit.PROBLEMS if failures else Exit.OK)
