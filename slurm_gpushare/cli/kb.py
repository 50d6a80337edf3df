"""``gpushare kb``: the knowledge base on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare.cli.output import Column, echo_json, table
from slurm_gpushare.errors import BadInput, GpushareError

if TYPE_CHECKING:
    from slurm_gpushare.knowledge.learning import Effect, LearnedKnowledge

_FILE = click.Path(path_type=Path)
_MODEL = click.option("--gpu-model", help="The GPU model to use of files that mix several.")


@click.group("kb")
def kb() -> None:
    """Fit, show, ask and feed the knowledge base."""


@kb.command("fit")
@click.option("--profiles", type=_FILE, help="Profiles with telemetry; without them clusters come from the rates.")
@click.option("--pairs", required=True, type=_FILE, help="Measured rates of pairs of these profiles.")
@click.option("--out", required=True, type=_FILE, help="The knowledge base to write, JSON.")
@click.option("-k", "k", type=int, help="Number of clusters; the elbow chooses unless given.")
@_MODEL
def fit(profiles: Path | None, pairs: Path, out: Path, k: int | None, gpu_model: str | None) -> None:
    """Learn a knowledge base from measured pairs."""
    from slurm_gpushare.knowledge import fitting
    from slurm_gpushare.knowledge.files import read_pairs, read_profiles

    known = read_profiles(profiles, gpu_model) if profiles else None
    measured = read_pairs(pairs, known.names if known else None, gpu_model, repeats=True, clip=False)
    result = fitting.fit(known, measured, source=f"{int(measured.feasible.sum())} feasible pairs of {pairs.name}", k=k)
    result.save(out)
    click.echo(
        f"{result.gpu_model}: {len(result.members)} profiles, {len(result.measured)} rates, {result.k} clusters by "
        f"{result.clusters_from}; wrote {out}"
    )


@kb.command("predict")
@click.option("--kb", "kb_file", type=_FILE, help="The knowledge base; the shipped one unless given.")
@click.option("--profiles", required=True, type=_FILE, help="Profiles to predict for.")
@click.option("--observed", type=_FILE, help="Pairs already observed among them.")
@click.option("--out", required=True, type=_FILE, help="The pairs to write, CSV.")
@_MODEL
def predict(kb_file: Path | None, profiles: Path, observed: Path | None, out: Path, gpu_model: str | None) -> None:
    """Predict the rates of every pair of profiles, each also beside its own kind.

    Besides the columns of a pairs file the output has low_a and low_b, the pessimistic ends of the rates.
    """
    from slurm_gpushare.knowledge.default import default_kb, default_model
    from slurm_gpushare.knowledge.files import read_pairs, read_profiles, write_rows
    from slurm_gpushare.knowledge.kb import KnowledgeBase, fits_together

    base = KnowledgeBase.load(kb_file) if kb_file else default_kb()
    asked = read_profiles(profiles, gpu_model)
    seen = read_pairs(observed, asked.names, gpu_model, repeats=True, clip=False) if observed else None
    if seen is not None and seen.gpu_model != asked.gpu_model:
        raise BadInput(f"{observed}: pairs of {seen.gpu_model}, profiles of {asked.gpu_model}", "Use one GPU model.")
    rates = base.predict(asked, seen, default_model())
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


@kb.command("show")
@click.option("--kb", "kb_file", type=_FILE, help="The knowledge base; the shipped one unless given.")
@click.option("--plot", type=_FILE, help="Also draw the two matrices to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def show(kb_file: Path | None, plot: Path | None, as_json: bool) -> None:
    """Print how clusters slow each other (ISD) and what packing them saves (PS)."""
    import numpy as np

    from slurm_gpushare.knowledge.cells import isd_matrix, ps_matrix
    from slurm_gpushare.knowledge.default import default_kb
    from slurm_gpushare.knowledge.kb import KnowledgeBase

    base = KnowledgeBase.load(kb_file) if kb_file else default_kb()
    isd, ps = isd_matrix(base.cells, base.k), ps_matrix(base.cells, base.k)
    if plot:
        from slurm_gpushare.knowledge.plots import matrices

        matrices(isd, ps, [str(number) for number in range(base.k)], f"{base.gpu_model}: {base.source}", plot)
    if as_json:
        echo_json(
            {
                "gpu_model": base.gpu_model,
                "source": base.source,
                "clusters_from": base.clusters_from,
                "isd_pct": [[None if np.isnan(v) else round(v, 2) for v in row] for row in isd.tolist()],
                "ps_pct": [[None if np.isnan(v) else round(v, 2) for v in row] for row in ps.tolist()],
                "cells": [
                    {"victim": c.victim, "neighbour": c.neighbour, "rate": c.rate, "sd": c.sd, "pairs": c.pairs}
                    for c in base.cells
                ],
            }
        )
        return
    click.echo(f"{base.gpu_model}, from {base.source}; clusters by {base.clusters_from}")
    heads = [Column(f"BESIDE {number}", ".1f", "right") for number in range(base.k)]
    for name, values in (("ISD %", isd), ("PS %", ps)):
        click.echo(f"\n{name} of each cluster")
        rows = [(number, *row) for number, row in enumerate(values.tolist())]
        click.echo(table([Column("CLUSTER", "", "right"), *heads], rows))
    rows = [(c.victim, c.neighbour, c.rate, c.sd, c.pairs) for c in base.cells]
    click.echo("\nEvidence")
    columns = ("CLUSTER", ""), ("BESIDE", ""), ("RATE", ".3f"), ("SD LOG", ".3f"), ("RATES SEEN", "")
    click.echo(table([Column(name, spec, "right") for name, spec in columns], rows))


@kb.command("import")
@click.argument("pairs", type=_FILE)
@_MODEL
def import_pairs(pairs: Path, gpu_model: str | None) -> None:
    """Take measured PAIRS, whose profiles are tokens, into the store as observations.

    The same file counts once, however often it is imported.
    """
    import time

    from slurm_gpushare.config import load_config
    from slurm_gpushare.knowledge.files import read_pairs
    from slurm_gpushare.store import Store
    from slurm_gpushare.store.sharing import Observation
    from slurm_gpushare.tokens import TOKEN

    measured = read_pairs(pairs, gpu_model=gpu_model, repeats=True)
    strange = [name for name in measured.names if not TOKEN.fullmatch(name)]
    if strange:
        raise BadInput(f"{pairs}: '{strange[0]}' is no token", "Use 'gpushare kb fit' for pairs of other names.")
    rows = zip(measured.profile_a, measured.profile_b, measured.rate_a, measured.rate_b, strict=True)
    now_s = int(time.time())
    found = [
        Observation(_source(a, b, rate, number), measured.gpu_model, a, b, float(rate), 1.0, now_s)
        for number, (first, second, rate_a, rate_b) in enumerate(rows)
        for a, b, rate in ((first, second, rate_a), (second, first, rate_b))
        if rate == rate  # infeasible pairs have none
    ]
    with Store(load_config().store_url) as store:
        added = store.observations.add(found)
    click.echo(f"{added} observations taken in, {len(found) - added} known already")


@kb.command("learn")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def learn(as_json: bool) -> None:
    """Replay what the store has observed, and say what was learned.

    The helper does this by itself after each ingest; here it is done anew, from the first observation on.
    """
    from slurm_gpushare.config import load_config
    from slurm_gpushare.coschedule.learn import Learner
    from slurm_gpushare.store import Store

    with Store(load_config().store_url) as store:
        learner = Learner(store)
        count = learner.catch_up()
    effects = learner.knowledge.effects()
    if as_json:
        echo_json({"observations": count, "tokens": [vars_of(item) for item in effects]})
        return
    click.echo(f"{count} observations of {len(effects)} tokens")
    if effects:
        columns = ("TOKEN", ""), ("SLOWED", "+.3f"), ("SD", ".3f"), ("SLOWS", "+.3f"), ("SD", ".3f")
        rows = [(e.token, e.victim, e.victim_sd, e.aggressor, e.aggressor_sd) for e in effects]
        click.echo(table([Column(name, spec, "right" if spec else "left") for name, spec in columns], rows))


def vars_of(item: Effect) -> dict[str, object]:
    """A dataclass with slots as a dictionary."""
    from dataclasses import asdict

    return asdict(item)


def _source(victim: str, neighbour: str, rate: float, row: int) -> str:
    return f"import:{victim}:{neighbour}:{row}:{rate:.6f}"


@kb.command("measure")
@click.argument("workloads", type=_FILE)
@click.option("--pairs", "count", default=10, show_default=True, type=click.IntRange(1), help="How many pairs to run.")
@click.option("--out", required=True, type=_FILE, help="The pairs file to write, CSV; for 'kb import' or 'kb fit'.")
@click.option("--gpu-model", default="V100", show_default=True, help="The GPU model that this card is.")
def measure(workloads: Path, count: int, out: Path, gpu_model: str) -> None:
    """Run WORKLOADS (CSV: token,command) alone and in pairs, and write the rates.

    Run it inside an allocation of one whole GPU on an otherwise idle node; the commands must end by themselves. The
    pairs of which least is known come first: by the store, where it can be read, else by this run alone. Commands are
    neither kept nor written anywhere.
    """
    from slurm_gpushare.knowledge.files import write_rows
    from slurm_gpushare.knowledge.measure import measure as run
    from slurm_gpushare.knowledge.measure import read_candidates

    if not out.parent.is_dir():
        raise BadInput(f"{out}: no directory {out.parent}", "Make it first.")
    candidates = read_candidates(workloads)
    rows: list[tuple[object, ...]] = []
    header = ("profile_a", "profile_b", "gpu_model", "feasible", "rate_a", "rate_b")
    for item in run(candidates, _known(), count, lambda line: click.echo(line, err=True)):
        rates = ["" if rate is None else f"{rate:.4f}" for rate in (item.rate_a, item.rate_b)]
        rows.append((item.a, item.b, gpu_model, int(item.rate_a is not None), *rates))
        write_rows(out, header, rows)  # after each pair: hours of measuring must not be lost
    click.echo(f"{len(rows)} pairs; wrote {out}")


def _known() -> LearnedKnowledge:
    """What the store has learned; nothing yet, where there is no store to read."""
    from slurm_gpushare.config import load_config
    from slurm_gpushare.coschedule.learn import Learner
    from slurm_gpushare.knowledge.learning import LearnedKnowledge
    from slurm_gpushare.store import Store

    try:
        with Store(load_config().store_url, read_only=True) as store:
            learner = Learner(store, writes=False)
            learner.catch_up()
            return learner.knowledge
    except GpushareError as error:
        click.echo(f"without the store's knowledge: {error.what}", err=True)
        return LearnedKnowledge()
