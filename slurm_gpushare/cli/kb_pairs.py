"""``gpushare kb import``, ``learn``, ``measure`` and ``bans``: what was seen of pairs, and what follows from it."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare.cli.options import DRY_RUN, FILE, JSON, check_directory
from slurm_gpushare.cli.output import Column, echo_json, echo_models, right, table
from slurm_gpushare.protocol.errors import BadInput, GpushareError

if TYPE_CHECKING:
    from slurm_gpushare.helper.learner import Learner
    from slurm_gpushare.knowledge.learning import LearnedKnowledge
    from slurm_gpushare.protocol.settings import Config
    from slurm_gpushare.store import Store

MODEL = click.option("--gpu-model", help="The GPU model to use of files that mix several.")


def models_of(store: Store, config: Config) -> list[str]:
    """The GPU models that share here, as the cards call themselves: so knowledge is kept."""
    from slurm_gpushare.store.workloads import models_of

    return list(models_of(store.database, config.gpu_models).values())


@click.command("import")
@click.argument("pairs", type=FILE)
@MODEL
def import_pairs(pairs: Path, gpu_model: str | None) -> None:
    """Take measured PAIRS, whose profiles are tokens, into the store as observations.

    The same file counts once, however often it is imported.
    """

    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.knowledge.tables import read_pairs
    from slurm_gpushare.protocol.tokens import TOKEN
    from slurm_gpushare.store import Store
    from slurm_gpushare.store.sharing import Observation

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
    with Store(settings().store_url) as store:
        added = store.observations.add(found)
    click.echo(f"{added} observations taken in, {len(found) - added} known already")


@click.command("learn", hidden=True)
@JSON
def learn(as_json: bool) -> None:
    """Replay what the store has observed, and say what was learned.

    The helper does this by itself after each ingest; here it is done anew, from the first observation on.
    """
    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.helper.cluster_assignment import assign_new
    from slurm_gpushare.helper.learner import Learner
    from slurm_gpushare.store import Store

    config = settings()
    with Store(config.store_url) as store:
        learners = [Learner(store, model) for model in models_of(store, config)]
        new = assign_new(store)
        counts = [learner.catch_up(new) for learner in learners]
    if as_json:
        documents = [_learned_json(learner, count) for learner, count in zip(learners, counts, strict=True)]
        echo_models(documents)
        return
    for learner, count in zip(learners, counts, strict=True):
        _print_learned(learner, count)


def _learned_json(learner: Learner, count: int) -> dict[str, object]:
    tokens = [asdict(item) for item in learner.knowledge.effects()]
    return {"gpu_model": learner.gpu_model, "observations": count, "base": learner.base.title, "tokens": tokens}


def _print_learned(learner: Learner, count: int) -> None:
    effects = learner.knowledge.effects()
    start = f"starting from {learner.base.title}"
    click.echo(f"{learner.gpu_model}: {count} observations of {len(effects)} tokens, {start}")
    if effects:
        columns = ("TOKEN", ""), ("SLOWED", "+.3f"), ("SD", ".3f"), ("SLOWS", "+.3f"), ("SD", ".3f"), ("SEEN", "d")
        rows = [(e.token, e.victim, e.victim_sd, e.aggressor, e.aggressor_sd, e.observations) for e in effects]
        click.echo(table([Column(name, spec, "right" if spec else "left") for name, spec in columns], rows))


def _source(victim: str, neighbour: str, rate: float, row: int) -> str:
    return f"import:{victim}:{neighbour}:{row}:{rate:.6f}"


@click.command("measure")
@click.argument("workloads", type=FILE)
@click.option("--pairs", "count", default=10, show_default=True, type=click.IntRange(1), help="How many pairs to run.")
@click.option("--out", required=True, type=FILE, help="The pairs file to write, CSV; for 'kb import' or 'kb fit'.")
@click.option("--gpu-model", default="V100", show_default=True, help="The GPU model that this card is.")
def measure(workloads: Path, count: int, out: Path, gpu_model: str) -> None:
    """Run WORKLOADS (CSV: token,command) alone and in pairs, and write the rates.

    Run it inside an allocation of one whole GPU on an otherwise idle node; the commands must end by themselves. The
    pairs of which least is known come first: by the store, where it can be read, else by this run alone. Commands are
    neither kept nor written anywhere.
    """
    from slurm_gpushare.knowledge.pair_trials import measure as run
    from slurm_gpushare.knowledge.pair_trials import read_candidates
    from slurm_gpushare.knowledge.tables import write_rows

    check_directory("--out", out)
    candidates = read_candidates(workloads)
    rows: list[tuple[object, ...]] = []
    header = ("profile_a", "profile_b", "gpu_model", "feasible", "rate_a", "rate_b")
    for item in run(candidates, _known(gpu_model), count, lambda line: click.echo(line, err=True)):
        rates = ["" if rate is None else f"{rate:.4f}" for rate in (item.rate_a, item.rate_b)]
        rows.append((item.a, item.b, gpu_model, int(item.rate_a is not None), *rates))
        write_rows(out, header, rows)  # after each pair: hours of measuring must not be lost
    click.echo(f"{len(rows)} pairs; wrote {out}")


def _known(gpu_model: str) -> LearnedKnowledge:
    """What the store has learned of a GPU model; nothing yet, where there is no store to read."""
    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.helper.learner import Learner
    from slurm_gpushare.knowledge.learning import LearnedKnowledge
    from slurm_gpushare.store import Store

    try:
        config = settings()
        with Store(config.store_url, read_only=True) as store:
            learner = Learner(store, gpu_model.upper(), writes=False)
            learner.catch_up()
            return learner.knowledge
    except GpushareError as error:
        click.echo(f"without the store's knowledge: {error.what}", err=True)
        return LearnedKnowledge()


@click.command("bans")
@click.option("--lift", metavar="TOKEN[,TOKEN]", help="Let a token sit beside the other, or beside anybody, again.")
@DRY_RUN
@JSON
def bans(lift: str | None, dry_run: bool, as_json: bool) -> None:
    """List pairs of workloads that are kept apart, and lift such bans.

    Two are kept apart after a promise was broken beside each other, 95 % sure. It fades after two weeks.
    """
    from slurm_gpushare.cli.access import settings
    from slurm_gpushare.protocol.tokens import TOKEN
    from slurm_gpushare.store import Store

    tokens = [] if lift is None else lift.split(",")
    if lift is not None and not (1 <= len(tokens) <= 2 and all(TOKEN.fullmatch(token) for token in tokens)):
        raise BadInput(f"--lift {lift}: must be one token, or two separated by a comma")
    now_s = time.time()
    with Store(settings().store_url) as store:
        found = [ban for ban in store.sharing.bans(now_s) if ban.names(tokens)]
        if tokens and not dry_run:
            store.sharing.lift(*tokens)
    if as_json:
        rows = [{"tokens": [ban.token_a, ban.token_b], "at_s": ban.at_s, "left_s": ban.left_s(now_s)} for ban in found]
        echo_json({"bans": rows, "lifted": bool(tokens) and not dry_run})
    elif tokens:
        click.echo(f"{'would lift' if dry_run else 'lifted'} {len(found)} ban{'' if len(found) == 1 else 's'}")
    elif not found:
        click.echo("no workloads are kept apart")
    else:
        day = "%Y-%m-%d"
        lines = [
            (ban.token_a, ban.token_b, time.strftime(day, time.localtime(ban.at_s)), round(ban.left_s(now_s) / 86400))
            for ban in found
        ]
        click.echo(table([Column("TOKEN"), Column("OTHER"), Column("SINCE"), right("DAYS LEFT")], lines))
