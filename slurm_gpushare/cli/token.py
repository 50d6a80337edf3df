"""``gpushare token``: names for workloads that never leave the user's home."""

from __future__ import annotations

import click

from slurm_gpushare.cli.output import Column, echo_json, table
from slurm_gpushare.tokens import TokenFile


class _NameOrCommand(click.Group):
    """``token list`` and ``token rm`` are commands; any other word is the name of a workload."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "NAME", _show, args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["NAME | list | rm NAME"]


@click.command("NAME", hidden=True)
@click.argument("name")
def _show(name: str) -> None:
    """Print the token of NAME, made on first use."""
    click.echo(TokenFile().get_or_make(name))


@click.group("token", cls=_NameOrCommand)
def token() -> None:
    """Make or show your token for a workload.

    'gpushare token NAME' prints the random token that stands for NAME and nothing else, so that it can be
    used in a job's comment: sbatch --comment=gpushare:$(gpushare token resnet). The name is kept
    in ~/.config/gpushare/tokens, readable by you alone, and never leaves it.
    """


@token.command("list")
@click.option("-n", "--noheader", is_flag=True, help="No headings.")
@click.option("-P", "--parsable", is_flag=True, help="Columns separated by '|'.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def list_tokens(noheader: bool, parsable: bool, as_json: bool) -> None:
    """List your tokens and their names."""
    items = TokenFile().all()
    if as_json:
        echo_json([{"token": item.token, "name": item.name} for item in items])
        return
    columns = (Column("TOKEN"), Column("NAME"))
    rows = [(item.token, item.name) for item in items]
    text = table(columns, rows, header=not noheader, delimiter="|" if parsable else None)
    if text:
        click.echo(text)


@token.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget the token of NAME; the next 'gpushare token NAME' makes a new one."""
    TokenFile().remove(name)
