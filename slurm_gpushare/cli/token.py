"""``gpushare token``: names for workloads that never leave the user's home."""

from __future__ import annotations

import os
import textwrap
import time
from dataclasses import asdict

import click

from slurm_gpushare.cli.console import (
    JSON,
    NO_HEADER,
    PARSABLE,
    Cell,
    Column,
    echo_json,
    right,
    settings_or_defaults,
    source,
    table,
    warn,
)
from slurm_gpushare.protocol.text import WIDTH, duration_text
from slurm_gpushare.protocol.tokens import TokenFile
from slurm_gpushare.report.job_text import PREALLOCATED
from slurm_gpushare.store.published import TokenFigures

_MARK = "*"
_NAME_WIDTH = 8
"""What a table shows of a name at least; more where 80 columns leave room."""


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
@NO_HEADER
@PARSABLE
@JSON
def list_tokens(noheader: bool, parsable2: bool, as_json: bool) -> None:
    """List your tokens: their names, and what is known of their workloads.

    A workload shares once it has been measured: RUNS says by how many runs. TIME and MEM are what it typically needs.
    Long names are cut on a table; -P and --json have them whole.
    """
    items = TokenFile().all()
    if not items and not (noheader or parsable2 or as_json):
        click.echo("No tokens yet. 'gpushare token NAME' makes one for the workload that you call NAME.")
        return
    figures = source(settings_or_defaults(loud=False))
    known = figures.tokens(os.geteuid())
    facts = {item.token: (known or {}).get(item.token, TokenFigures(item.token)) for item in items}
    if as_json:
        is_known = {token: None if known is None else fact.runs > 0 for token, fact in facts.items()}
        named = {item.token: {"name": item.name, "known": is_known[item.token]} for item in items}
        echo_json([asdict(fact) | named[token] for token, fact in facts.items()])
        return
    numbers = map(right, ("CLUSTER", "RUNS", "TIME", "MEM"))
    columns = (Column("TOKEN"), Column("NAME"), Column("KNOWN"), *numbers, Column("LAST"))
    mark = "" if parsable2 else _MARK
    about = {item.token: _known(facts[item.token], known is not None, mark) for item in items}

    def listed(name_width: int | None) -> str:
        rows = [(item.token, item.name[:name_width], *about[item.token]) for item in items]
        return table(columns, rows, header=not noheader, delimiter="|" if parsable2 else None)

    text = listed(None)
    too_wide = max(map(len, text.splitlines()), default=0) - WIDTH
    if too_wide > 0 and not parsable2:
        text = listed(max(_NAME_WIDTH, max(len(item.name) for item in items) - too_wide))
    if text:
        click.echo(text)
    if not noheader and not parsable2 and any(facts[item.token].preallocated for item in items):
        click.echo(textwrap.fill(f"{_MARK} {PREALLOCATED}.", WIDTH, subsequent_indent="  "))
    if figures.note and items and not noheader:
        warn(figures.note)


def _known(facts: TokenFigures, any_known: bool, preallocated: str) -> tuple[Cell, ...]:
    if not any_known:
        return (None,) * 6
    mark = preallocated if facts.preallocated else ""
    mem = None if facts.mem_used_mib is None else f"{facts.mem_used_mib / 1024:.1f}G{mark}"
    last = None if facts.last_used_s is None else time.strftime("%m-%d", time.localtime(facts.last_used_s))
    duration = None if facts.duration_s is None else duration_text(facts.duration_s)
    return ("yes" if facts.runs else "no", facts.cluster, facts.runs, duration, mem, last)


@token.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget the token of NAME; the next 'gpushare token NAME' makes a new one."""
    TokenFile().remove(name)
