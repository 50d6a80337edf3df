"""``gpushare kb``: the knowledge base on the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_gpushare.cli.kb_clusters import clusters
from slurm_gpushare.cli.kb_pairs import MODEL, bans, import_pairs, learn, measure, models_of
from slurm_gpushare.cli.options import FILE, JSON, check_directory
from slurm_gpushare.cli.output import echo_models, right, table
from slurm_gpushare.protocol.errors import BadInput, GpushareError

if TYPE_CHECKING:
    from slurm_gpushare.helper.site_knowledge import Figure5


@click.group("kb")
def kb() -> None:
    """Fit, show, ask and feed the knowledge base."""


@kb.command("fit")
@click.option("--profiles", type=FILE, help="Profiles with telemetry; without them clusters come from the rates.")
@click.option("--pairs", required=True, type=FILE, help="Measured rates of pairs of these profiles.")
@click.option("--out", required=True, type=FILE, help="The knowledge base to write, JSON.")
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
@click.option("--kb", "kb_file", type=FILE, help="The knowledge base; the shipped one unless given.")
@click.option("--profiles", required=True, type=FILE, help="Profiles to predict for.")
@click.option("--observed", type=FILE, help="Pairs already observed among them.")
@click.option("--out", required=True, type=FILE, help="The pairs to write, CSV.")
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

    header = ("profile_a", "profile_b", "gpu_model", "feasible", "rate_a", "rate_b", "low_a", "low_b")
    write_rows(out, header, rows())
    click.echo(f"{len(names)} profiles, {len(names) * (len(names) + 1) // 2} pairs; wrote {out}")


@kb.command("use")
@click.argument("kb_file", type=FILE, required=False)
@click.option("--shipped", is_flag=True, help="Go back to the shipped knowledge base.")
@click.option("--gpu-model", default="V100", show_default=True, help="With --shipped: of which GPU model.")
def use(kb_file: Path | None, shipped: bool, gpu_model: str) -> None:
    """Put the knowledge base KB_FILE, written by 'kb fit', in force for its GPU model.

    A running helper takes it on SIGHUP (systemctl reload gpushare-backfill); what it has learned of tokens is kept.
    'gpushare status' says which one it runs on.
    """
    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.helper.learner import base_in_force, base_name
    from slurm_gpushare.knowledge.kb import KnowledgeBase
    from slurm_gpushare.store import Store

    if (kb_file is None) != shipped:
        raise BadInput("give a knowledge base, or --shipped", "One of them.")
    base = KnowledgeBase.load(kb_file) if kb_file else None
    with Store.create(settings().store_url) as store:
        if base is None:
            store.knowledge.drop(base_name(gpu_model.upper()))
        else:
            store.knowledge.put({base_name(base.gpu_model): base.without_names().to_json()})
        current = base_in_force(store, base.gpu_model if base else gpu_model)
    click.echo(f"in force: {current.title}. A running helper takes it with: systemctl reload gpushare-backfill")


@kb.command("show")
@click.option("--kb", "kb_file", type=FILE, help="Only this knowledge base, from a file.")
@click.option("--shipped", is_flag=True, help="Only the shipped knowledge base.")
@click.option("--gpu-model", help="Of which GPU model; default: all of gpushare.conf.")
@JSON
def show(kb_file: Path | None, shipped: bool, gpu_model: str | None, as_json: bool) -> None:
    """Print how clusters slow each other (ISD) and what packing them saves (PS).

    The site's own figures come first, from what is known of the tokens in the store; the base that they started from
    stands beside them.
    """
    from slurm_gpushare.helper.site_knowledge import of_base
    from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb

    if kb_file or shipped:
        base = KnowledgeBase.load(kb_file) if kb_file else default_kb()
        figures = [of_base(base)]
    else:
        figures = _figures(gpu_model)
    if as_json:
        documents = [_with_site(own) for own in _by_model(figures)]
        echo_models(documents)
        return
    for number, figure in enumerate(figures):
        click.echo(("\n" if number else "") + f"{figure.title}; clusters by {figure.clusters_from}")
        heads = [right(f"BESIDE {column}", ".1f") for column in range(figure.k)]
        for name, values in (("ISD %", figure.isd()), ("PS %", figure.ps())):
            click.echo(f"\n{name} of each cluster")
            rows = [(row, *line) for row, line in enumerate(values.tolist())]
            click.echo(table([right("CLUSTER"), *heads], rows))
        click.echo("\nEvidence")
        cells = [(c.victim, c.neighbour, _known_or_none(c.rate), _known_or_none(c.sd), c.pairs) for c in figure.cells]
        columns = ("CLUSTER", ""), ("BESIDE", ""), ("RATE", ".3f"), ("SD LOG", ".3f"), ("RATES SEEN", "")
        click.echo(table([right(name, spec) for name, spec in columns], cells))


def _figures(gpu_model: str | None) -> list[Figure5]:
    """The site's own figure where its store can be read and knows tokens, and that of the base in force."""
    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.helper.site_knowledge import of_base, of_site
    from slurm_gpushare.knowledge.kb import default_kb
    from slurm_gpushare.store import Store

    try:
        config = settings()
        with Store(config.store_url, read_only=True) as store:
            models = [gpu_model.upper()] if gpu_model else models_of(store, config)
            return [figure for model in models for figure in of_site(store, model)]
    except GpushareError as error:
        click.echo(f"without this site's own figures: {error.what}", err=True)
        return [of_base(default_kb())]


def _by_model(figures: list[Figure5]) -> list[list[Figure5]]:
    """The figures of each GPU model: its own, where there is one, and then its base's, which ends them."""
    found: list[list[Figure5]] = [[]]
    for figure in figures:
        found[-1].append(figure)
        if figure.evidence:
            found.append([])
    return [own for own in found if own]


def _with_site(figures: list[Figure5]) -> dict[str, Any]:
    """A base as JSON, with what this site knows of the model beside it."""
    documents = [_as_json(figure) for figure in figures]
    return documents[-1] | ({"site": documents[0]} if len(documents) > 1 else {})


def _as_json(figure: Figure5) -> dict[str, Any]:
    return {
        "gpu_model": figure.gpu_model,
        "source": figure.source,
        "clusters_from": figure.clusters_from,
        "isd_pct": [[_known_or_none(round(v, 2)) for v in row] for row in figure.isd().tolist()],
        "ps_pct": [[_known_or_none(round(v, 2)) for v in row] for row in figure.ps().tolist()],
        "cells": [
            {
                "victim": c.victim, "neighbour": c.neighbour, "rate": _known_or_none(c.rate),
                "sd": _known_or_none(c.sd), "pairs": c.pairs,
            }
            for c in figure.cells
        ],
    }  # fmt: skip


def _known_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


for _command in (import_pairs, learn, measure, bans, clusters):
    kb.add_command(_command)
