"""``gpushare card-check``: does this card do what slurm-gpushare relies on, and if not, what to set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from slurm_gpushare.cli.console import DRY_RUN, FILE, JSON, echo_json, table
from slurm_gpushare.protocol.errors import BadInput, Exit, GpushareError
from slurm_gpushare.protocol.files import check_directory


@click.command("card-check")
@click.argument("tries", nargs=-1, metavar="[TRY]...")
@click.option("--gpu", type=click.IntRange(0, 255), help="Index of the card; default: the job's first, else 0.")
@click.option(
    "--seconds", default=3.0, show_default=True, type=click.FloatRange(0.1, 30), help="How long a look lasts."
)
@click.option(
    "--pairs", type=FILE, help="The rates of the try 'slices' (else 'mps') as CSV, for 'kb fit' and 'kb import'."
)
@DRY_RUN
@JSON
@click.pass_context
def card_check(
    ctx: click.Context, tries: tuple[str, ...], gpu: int | None, seconds: float, pairs: Path | None, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Try on a real card what slurm-gpushare relies on.

    Run it on an idle card: in a job that has a whole one, or as root on a node that is drained, which tries more. It
    takes under ten minutes and leaves the card as it was. Each row has what is relied on, what this card and driver do,
    and what to set. With --json, all of it in numbers: no names of hosts, users or files, so that it can be handed on.
    """
    from slurm_gpushare.node.card_check import BAD, TRIES, about, limit_s, outcome
    from slurm_gpushare.node.nvml import NvmlError

    if unknown := [name for name in tries if name not in TRIES]:
        raise BadInput(f"card-check: '{unknown[0]}' is no try", f"There are: {', '.join(TRIES)}.")
    chosen = tries or tuple(TRIES)
    if dry_run:
        lines = [(name, TRIES[name].relies_on, limit_s(name, seconds)) for name in chosen]
        click.echo(table(["TRY", "RELIES ON", "AT MOST S>.0f"], lines))
        return
    if pairs is not None:
        check_directory("--pairs", pairs)
    index = _first_gpu() if gpu is None else gpu
    try:
        card = about(index)
    except NvmlError as error:
        raise GpushareError(f"card-check: GPU {index}: {error}", "Is there a driver? See nvidia-smi.") from error
    rows = {}
    for name in chosen:
        row = rows[name] = outcome(name, index, seconds)
        if not as_json:
            click.echo(f"{row.verdict.ljust(7)} {name}: {row.found}")
            if row.verdict in BAD:
                click.echo(f"        relied on: {TRIES[name].relies_on}. {TRIES[name].set_}")
    if as_json:
        told = [
            {"try": name, "relies_on": TRIES[name].relies_on, "set": TRIES[name].set_, **asdict(rows[name])}
            for name in rows
        ]
        echo_json({"format": 1, **card, "seconds": seconds, "rows": told})
    grids = [rows[name].figures for name in ("slices", "mps") if name in rows and rows[name].figures]
    if pairs is not None and grids:
        _write_pairs(pairs, card["gpu_model"], grids[0])
    bad = sum(row.verdict in BAD for row in rows.values())
    if not as_json:
        click.echo(f"{len(rows)} tries: {bad} not as relied on")
    ctx.exit(Exit.PROBLEMS if bad else Exit.OK)


def _first_gpu() -> int:
    found = re.match(r"\d{1,3}", os.environ.get("SLURM_JOB_GPUS", ""))
    return int(found.group()) if found else 0


def _write_pairs(path: Path, model: str, grid: Mapping[str, Any]) -> None:
    """Pairs of tokens that no job has, so that they can be imported beside a site's own."""
    from slurm_gpushare.knowledge.tables import write_rows
    from slurm_gpushare.protocol.tokens import new_token

    loads = [(new_token(), load) for load in grid["loads"]]
    pairs = ((*loads[a], *loads[b], min(rate_a, 1.0), min(rate_b, 1.0)) for a, b, rate_a, rate_b in grid["pairs"])
    header = ("profile_a", "load_a", "profile_b", "load_b", "gpu_model", "feasible", "rate_a", "rate_b")
    write_rows(path, header, ((*pair[:4], model, 1, *pair[4:]) for pair in pairs))
