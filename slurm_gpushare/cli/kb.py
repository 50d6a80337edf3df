"""``gpushare kb``: the knowledge base on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_gpushare.cli import console
from slurm_gpushare.cli.kb_clusters import clusters
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import check_directory
from slurm_gpushare.protocol.text import counted, moment

if TYPE_CHECKING:
    from slurm_gpushare.helper.learner import ClusterPairs


_OF_A_CELL = ("victim", "neighbour", "rate", "sd", "pairs")
_HEADER = ("profile_a", "profile_b", "gpu_model", "feasible", "rate_a", "rate_b")
MODEL = click.option("--gpu-model", help="The GPU model to use of files that mix several.")


@click.group("kb")
def kb() -> None:
    """Fit, show, ask and feed the knowledge base."""


@kb.command("fit")
@click.option(
    "--profiles", type=console.FILE, help="Profiles with telemetry; without them clusters come from the rates."
)
@click.option("--pairs", required=True, type=console.FILE, help="Measured rates of pairs of these profiles.")
@click.option("--out", required=True, type=console.FILE, help="The knowledge base to write, JSON.")
@click.option("-k", "k", type=int, help="Number of clusters; the elbow chooses unless given.")
@MODEL
def fit(profiles: Path | None, pairs: Path, out: Path, k: int | None, gpu_model: str | None) -> None:
    """Learn a knowledge base from measured pairs."""
    from slurm_gpushare.knowledge import fitting
    from slurm_gpushare.knowledge.tables import read_pairs, read_profiles

    check_directory("--out", out)
    known = read_profiles(profiles, gpu_model) if profiles else None
    measured = read_pairs(pairs, known.names if known else None, gpu_model, repeats=True, clip=False)
    result = fitting.fit(known, measured, source=f"{int(measured.feasible.sum())} feasible pairs of {pairs.name}", k=k)
    result.save(out)
    click.echo(
        f"{result.gpu_model}: {len(result.members)} profiles, {len(result.measured)} rates, {result.k} clusters by "
        f"{result.clusters_from}; wrote {out}"
    )


@kb.command("predict")
@click.option("--kb", "kb_file", type=console.FILE, help="The knowledge base; the shipped one unless given.")
@click.option("--profiles", required=True, type=console.FILE, help="Profiles to predict for.")
@click.option("--observed", type=console.FILE, help="Pairs already observed among them.")
@click.option("--out", required=True, type=console.FILE, help="The pairs to write, CSV.")
@MODEL
def predict(kb_file: Path | None, profiles: Path, observed: Path | None, out: Path, gpu_model: str | None) -> None:
    """Predict the rates of every pair of profiles, each also beside its own kind.

    Besides the columns of a pairs file the output has low_a and low_b, the pessimistic ends of the rates.
    """
    from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb, fits_together
    from slurm_gpushare.knowledge.tables import read_pairs, read_profiles, write_rows

    check_directory("--out", out)
    base = KnowledgeBase.load(kb_file) if kb_file else default_kb()
    asked = read_profiles(profiles, gpu_model)
    seen = read_pairs(observed, asked.names, gpu_model, repeats=True, clip=False) if observed else None
    if seen is not None and seen.gpu_model != asked.gpu_model:
        raise BadInput(f"{observed}: pairs of {seen.gpu_model}, profiles of {asked.gpu_model}", "Use one GPU model.")
    rates = base.predict(asked, seen)
    feasible = fits_together(asked)
    if seen is not None:
        place = {name: at for at, name in enumerate(asked.names)}
        for a, b, possible in zip(seen.profile_a, seen.profile_b, seen.feasible.tolist(), strict=True):
            if not possible:
                feasible[place[a], place[b]] = feasible[place[b], place[a]] = False
    mean, low, fits, names = rates.mean.tolist(), rates.low.tolist(), feasible.tolist(), asked.names

    def rows() -> Iterator[tuple[object, ...]]:
        for i, a in enumerate(names):
            for j in range(i, len(names)):
                both = (f"{mean[i][j]:.5f}", f"{mean[j][i]:.5f}", f"{low[i][j]:.5f}", f"{low[j][i]:.5f}")
                yield (a, names[j], asked.gpu_model, int(fits[i][j]), *both)

    write_rows(out, (*_HEADER, "low_a", "low_b"), rows())
    click.echo(f"{len(names)} profiles, {len(names) * (len(names) + 1) // 2} pairs; wrote {out}")


@kb.command("use")
@click.argument("kb_file", type=console.FILE, required=False)
@click.option("--shipped", is_flag=True, help="Go back to the shipped knowledge base.")
@click.option("--gpu-model", default="V100", show_default=True, help="With --shipped: of which GPU model.")
def use(kb_file: Path | None, shipped: bool, gpu_model: str) -> None:
    """Put the knowledge base KB_FILE, written by 'kb fit', in force for its GPU model.

    A running helper takes it on SIGHUP (systemctl reload gpushare-backfill); what it has learned of tokens is kept.
    'gpushare status' says which one it runs on.
    """
    from slurm_gpushare.helper.learner import base_in_force, base_name
    from slurm_gpushare.knowledge.kb import KnowledgeBase
    from slurm_gpushare.store import Store

    if (kb_file is None) != shipped:
        raise BadInput("give a knowledge base, or --shipped", "One of them.")
    base = KnowledgeBase.load(kb_file) if kb_file else None
    with Store.create(console.settings().store_url) as store:
        if base is None:
            store.knowledge.drop(base_name(gpu_model.upper()))
        else:
            store.knowledge.put({base_name(base.gpu_model): base.without_names().to_json()})
        current = base_in_force(store, base.gpu_model if base else gpu_model)
    click.echo(f"in force: {current.title}. A running helper takes it with: systemctl reload gpushare-backfill")


@kb.command("show")
@click.option("--kb", "kb_file", type=console.FILE, help="Only this knowledge base, from a file.")
@click.option("--shipped", is_flag=True, help="Only the shipped knowledge base.")
@click.option("--gpu-model", help="Of which GPU model; default: all of gpushare.conf.")
@console.JSON
def show(kb_file: Path | None, shipped: bool, gpu_model: str | None, as_json: bool) -> None:
    """Print how clusters slow each other (ISD) and what packing them saves (PS).

    The site's own figures come first, from what is known of the tokens in the store; the base that they started from
    stands beside them.
    """
    from slurm_gpushare.helper.learner import of_base
    from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb

    if kb_file or shipped:
        figures = [[of_base(KnowledgeBase.load(kb_file) if kb_file else default_kb())]]
    else:
        figures = _figures(gpu_model)
    if as_json:
        documents = [[_as_json(figure) for figure in own] for own in figures]
        console.echo_models([own[-1] | ({"site": own[0]} if len(own) > 1 else {}) for own in documents])
        return
    for number, figure in enumerate(chain(*figures)):
        click.echo(("\n" if number else "") + f"{figure.title}; clusters by {figure.clusters_from}")
        heads = [f"BESIDE {column}>.1f" for column in range(figure.k)]
        for name, values in (("ISD %", figure.isd()), ("PS %", figure.ps())):
            click.echo(f"\n{name} of each cluster")
            click.echo(console.table(["CLUSTER>", *heads], [(row, *line) for row, line in enumerate(values.tolist())]))
        click.echo("\nEvidence")
        columns = ("CLUSTER", ""), ("BESIDE", ""), ("RATE", ".3f"), ("SD LOG", ".3f"), ("RATES SEEN", "")
        cells = ((c.victim, c.neighbour, c.rate, c.sd, c.pairs) for c in figure.cells)
        click.echo(console.table([f"{name}>{spec}" for name, spec in columns], cells))


def _figures(gpu_model: str | None) -> list[list[ClusterPairs]]:
    """For each GPU model the site's own figure, where its store can be read and knows tokens, and then the base's."""
    from slurm_gpushare.helper.learner import of_base, of_site
    from slurm_gpushare.knowledge.kb import default_kb
    from slurm_gpushare.store.workloads import models_of

    try:
        config = console.settings()
        with console.open_store(config, read_only=True) as store:
            models = [gpu_model.upper()] if gpu_model else models_of(store.database, config.gpu_models).values()
            return [of_site(store, model) for model in models]
    except GpushareError as error:
        click.echo(f"without this site's own figures: {error.what}", err=True)
        return [[of_base(default_kb())]]


def _as_json(figure: ClusterPairs) -> dict[str, Any]:
    return {
        "gpu_model": figure.gpu_model,
        "source": figure.source,
        "clusters_from": figure.clusters_from,
        "isd_pct": figure.isd().round(2).tolist(),
        "ps_pct": figure.ps().round(2).tolist(),
        "cells": [{name: getattr(cell, name) for name in _OF_A_CELL} for cell in figure.cells],
    }


# ``gpushare kb import`` and ``bans``: what was seen of pairs, and what follows from it.


@kb.command("import")
@click.argument("pairs", type=console.FILE)
@MODEL
def import_pairs(pairs: Path, gpu_model: str | None) -> None:
    """Take measured PAIRS, whose profiles are tokens, into the store as observations.

    The same file counts once, however often it is imported.
    """
    from slurm_gpushare.knowledge.tables import read_pairs
    from slurm_gpushare.protocol.tokens import TOKEN
    from slurm_gpushare.store.sharing import Observation

    measured = read_pairs(pairs, gpu_model=gpu_model, repeats=True)
    strange = [name for name in measured.names if not TOKEN.fullmatch(name)]
    if strange:
        raise BadInput(f"{pairs}: '{strange[0]}' is no token", "Use 'gpushare kb fit' for pairs of other names.")
    rows = zip(measured.profile_a, measured.profile_b, measured.rate_a, measured.rate_b, strict=True)
    now_s = int(time.time())
    found = [
        Observation(f"import:{a}:{b}:{number}:{rate:.6f}", measured.gpu_model, a, b, float(rate), 1.0, now_s)
        for number, (first, second, rate_a, rate_b) in enumerate(rows)
        for a, b, rate in ((first, second, rate_a), (second, first, rate_b))
        if rate == rate  # infeasible pairs have none
    ]
    with console.open_store(console.settings()) as store:
        added = store.observations.add(found)
    click.echo(f"{added} observations taken in, {len(found) - added} known already")


@kb.command("bans")
@click.option("--lift", metavar="TOKEN[,TOKEN]", help="Let a token sit beside the other, or beside anybody, again.")
@console.DRY_RUN
@console.JSON
def bans(lift: str | None, dry_run: bool, as_json: bool) -> None:
    """List pairs of workloads that are kept apart, and lift such bans.

    Two are kept apart after a promise was broken beside each other, 95 % sure. It fades after two weeks.
    """
    from slurm_gpushare.protocol.tokens import TOKEN

    tokens = [] if lift is None else lift.split(",")
    if lift is not None and not (1 <= len(tokens) <= 2 and all(TOKEN.fullmatch(token) for token in tokens)):
        raise BadInput(f"--lift {lift}: must be one token, or two separated by a comma")
    now_s = time.time()
    with console.open_store(console.settings()) as store:
        found = [ban for ban in store.sharing.bans(now_s) if ban.names(tokens)]
        if tokens and not dry_run:
            store.sharing.lift(*tokens)
    if as_json:
        rows = [{"tokens": [ban.token_a, ban.token_b], "at_s": ban.at_s, "left_s": ban.left_s(now_s)} for ban in found]
        console.echo_json({"bans": rows, "lifted": bool(tokens) and not dry_run})
    elif tokens:
        click.echo(f"{'would lift' if dry_run else 'lifted'} {counted(len(found), 'ban')}")
    elif not found:
        click.echo("no workloads are kept apart")
    else:
        columns = (
            "TOKEN",
            "OTHER",
            "SINCE",
            "DAYS LEFT>",
        )
        lines = ((b.token_a, b.token_b, moment(b.at_s, "%Y-%m-%d"), round(b.left_s(now_s) / 86400)) for b in found)
        click.echo(console.table(columns, lines))


kb.add_command(clusters)
