"""``gpushare token``: names for workloads that never leave the user's home."""

from __future__ import annotations

import getpass
import os
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.text import WIDTH, duration_text, moment
from slurm_gpushare.protocol.tokens import TokenFile
from slurm_gpushare.report.job_text import PREALLOCATED
from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.store.published import TokenFigures

_MARK = "*"
_NAME_WIDTH = 8
"""What a table shows of a name at least; more where 80 columns leave room."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """A token of the user's, and what is known of its workload."""

    name: str
    figures: TokenFigures
    readable: bool
    """Whether this user can read what is known."""
    completed: frozenset[int] | None = None
    """The user's jobs that came to their end, by SLURM_JOB_ID; None where accounting does not say."""

    @property
    def runs(self) -> int | None:
        """Runs to the end; of a workload that came from elsewhere those that its profile was made of."""
        if not self.readable:
            return None
        jobs = self.figures.jobs
        return len(self.completed & set(jobs)) if jobs and self.completed is not None else self.figures.runs

    @property
    def known(self) -> bool | None:
        return self.figures.runs > 0 if self.readable else None


def _mem(line: TokenLine, mark: str = "") -> str | None:
    mib = line.figures.mem_used_mib
    return None if mib is None else f"{mib / 1024:.1f}G{mark if line.figures.preallocated else ''}"


FIELDS: dict[str, tuple[str, Callable[[TokenLine], console.Cell]]] = {
    "token": ("TOKEN", lambda line: line.figures.token),
    "name": ("NAME", lambda line: line.name),
    "known": ("KNOWN", lambda line: {True: "yes", False: "no", None: None}[line.known]),
    "cluster": ("CLUSTER>", lambda line: line.figures.cluster),
    "runs": ("RUNS>", lambda line: line.runs),
    "time": ("TIME>", lambda line: duration_text(line.figures.duration_s)),
    "mem": ("MEM>", _mem),
    "last": (
        "LAST",
        lambda line: line.figures.last_used_s and moment(line.figures.last_used_s, "%m-%d"),
    ),
}


class _NameOrCommand(click.Group):
    """``token list`` and ``token rm`` are commands; any other word is the name of a workload."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "NAME", _show, args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["NAME [--sbatch] | list | rm NAME"]


@click.command("NAME", hidden=True)
@click.argument("name")
@click.option("--sbatch", "as_line", is_flag=True, help="Print the line for a job script.")
def _show(name: str, as_line: bool) -> None:
    """Print the token of NAME, made on first use."""
    click.echo(("#SBATCH --comment=gpushare:" if as_line else "") + TokenFile().get_or_make(name))


@click.group("token", cls=_NameOrCommand)
def token() -> None:
    """Make or show your token for a workload.

    'gpushare token NAME' prints the random token that stands for NAME and nothing else, so that it can be
    used in a job's comment: sbatch --comment=gpushare:$(gpushare token resnet). No shell reads a script's #SBATCH
    lines: 'gpushare token NAME --sbatch' prints the line to put there. The name is kept in
    ~/.config/gpushare/tokens, readable by you alone, and never leaves it.
    """


@token.command("list")
@console.listing(FIELDS, tuple(FIELDS))
def list_tokens(listing: console.Listing) -> None:
    """List your tokens: their names, and what is known of their workloads.

    A workload shares once it has been measured. RUNS are jobs of the last month that came to their end, TIME and MEM
    what it typically needs.
    Long names are cut on a table; -P and --json have them whole.
    """
    items = TokenFile().all()
    if not items and listing.for_people:
        click.echo("No tokens yet. 'gpushare token NAME' makes one for the workload that you call NAME.")
        return
    figures = console.source(console.settings_or_defaults(loud=False))
    told = figures.tokens(os.geteuid())
    known = {item.token: TokenFigures(item.token) for item in items} | dict(told or {})
    done = _completed() if any(figure.jobs for figure in known.values()) else None
    lines = [TokenLine(item.name, known[item.token], told is not None, done) for item in items]
    if listing.as_json:
        console.echo_json([_document(line) for line in lines])
        return
    if not listing.parsable:
        listing = replace(listing, fields={**FIELDS, "mem": ("MEM>", lambda line: _mem(line, _MARK))})
    text = listing.text(lines)
    too_wide = 0 if listing.parsable else max(map(len, text.splitlines()), default=0) - WIDTH
    if too_wide > 0:
        width = max(_NAME_WIDTH, max(len(item.name) for item in items) - too_wide)
        text = listing.text(lines, name=("NAME", lambda line: line.name[:width]))
    if text:
        click.echo(text)
    if listing.for_people and any(line.figures.preallocated for line in lines):
        click.echo(textwrap.fill(f"{_MARK} {PREALLOCATED}.", WIDTH, subsequent_indent="  "))
    if figures.note and items and listing.header:
        console.warn(figures.note)


def _document(line: TokenLine) -> dict[str, Any]:
    told = {name: value for name, value in asdict(line.figures).items() if name != "jobs"}
    return told | {"name": line.name, "known": line.known, "runs": line.runs or 0}


def _completed() -> frozenset[int] | None:
    """The caller's jobs of the last month that came to their end: neither cancelled ones nor what was requeued."""
    try:
        # With states and without an end sacct looks at the moment of the start alone.
        month = AccountingQuery(start="now-31days", end="now", users=getpass.getuser(), states="COMPLETED")
        return frozenset(job.raw_id for job in connect().accounting(month))
    except SlurmError:
        return None


@token.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget the token of NAME; the next 'gpushare token NAME' makes a new one."""
    TokenFile().remove(name)
