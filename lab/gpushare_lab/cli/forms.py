"""``gpushare-lab forms``: real, short jobs in every way to ask for GPUs, on the Slurm of this machine."""

from __future__ import annotations

import click

from gpushare_lab.forms import try_all
from slurm_gpushare.cli.console import JSON
from slurm_gpushare.cli.doctor import say
from slurm_gpushare.protocol.errors import Exit
from slurm_gpushare.site.finding import Level


@click.command()
@click.option("--brief", is_flag=True, help="Only the forms that stand for all.")
@click.option("-p", "--partition", metavar="NAME", help="Submit here; by default the first of ours.")
@click.option("-A", "--account", metavar="NAME", help="Submit under this account.")
@click.option("--wait", "wait_s", default=300.0, show_default=True, metavar="SECONDS",
              help="Longest time to wait for GPUs. Jobs that wait longer are cancelled.")  # fmt: skip
@JSON
@click.pass_context
def forms(
    ctx: click.Context, brief: bool, partition: str | None, account: str | None, wait_s: float, as_json: bool
) -> None:
    """Submit real, short jobs in every way to ask for GPUs, and say what their user sees.

    Run it as an ordinary user on a login node, in a directory that the nodes see too: it submits about fifty jobs of a
    second each, for up to two GPUs on up to two nodes, and changes nothing else. A job without a token must get what
    plain Slurm gives it: exit code 3 where one does not.
    """
    found = list(try_all(partition, account, wait_s, brief))
    say(found, as_json)
    ctx.exit(Exit.PROBLEMS if any(finding.level is Level.FAIL for finding in found) else Exit.OK)
