"""``gpushare-lab demo``: the paper's experiment on a throw-away Slurm, with workloads that nobody knows beforehand."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from gpushare_lab.cli.checks import check_new_directory
from gpushare_lab.cli.demo_table import FIGURES, learned, shown
from gpushare_lab.cli.testbed import SLURM, Steps, stop_on_sigterm, throw_away_dir
from gpushare_lab.experiment.run_page import write_run_page
from gpushare_lab.paper.jobs import Queue, paper_jobs
from gpushare_lab.paper.rounds import (
    AGAIN,
    EXCLUSIVE,
    OURS,
    POLICIES,
    SHORT,
    PaperResult,
    PolicyOutcome,
    Progress,
    TestbedRun,
)
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.cli.console import warn
from slurm_gpushare.knowledge.tables import write_rows
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.whatif.assess import shipped_pairs

BAR = 24


def _shipped_pairs(directory: Path) -> Path:
    """The measured V100 pairs of the shipped knowledge base, as a file: every clone shows the same."""
    pairs, path = shipped_pairs(), directory / "v100_pairs.csv"
    rows = [
        (a, b, "V100", *(("1", pairs.rate[i, j], pairs.rate[j, i]) if np.isfinite(pairs.rate[i, j]) else ("0", "", "")))
        for i, a in enumerate(pairs.profiles)
        for j, b in enumerate(pairs.profiles)
        if i <= j
    ]
    write_rows(path, ("profile_a", "profile_b", "gpu_model", "feasible", "rate_a", "rate_b"), rows)
    return path.resolve()


@click.command()
@click.option("--policies", default=",".join(SHORT), show_default=True,
              help=f"Which to compare, in this order, or 'all': {', '.join(POLICIES)}.")  # fmt: skip
@click.option("--jobs", default=36, show_default=True, help="Jobs, a third of each cluster.")
@click.option("--runs", default=4, show_default=True, type=click.IntRange(1), help="Jobs that have one token.")
@click.option("--gpus", default=5, show_default=True, help="GPUs, one a node.")
@click.option("--seconds", "mean_s", default=8.0, show_default=True, help="Mean time that a job takes alone.")
@click.option("--spread", default=1.2, show_default=True, type=click.FloatRange(0, 3),
              help="Of the logarithm of that time: most are short, a few hold most of the time.")  # fmt: skip
@click.option("--seed", default=4, show_default=True, help="Of the jobs and their order.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1), help="So many seeds, from --seed on.")
@click.option("--pairs", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measured rates. Default: the V100 pairs of the shipped knowledge base.")  # fmt: skip
@click.option("--profiles", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measured telemetry of the profiles of --pairs; else it is inferred from their rates.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/demo"), show_default=True,
              help="Write the table, a picture and the run's page to this directory.")  # fmt: skip
@SLURM
@throw_away_dir("/var/lib/gpushare-demo")
def demo(
    policies: str, jobs: int, runs: int, gpus: int, mean_s: float, spread: float, seed: int, seeds: int,
    pairs: Path | None, profiles: Path | None, out: Path, suite: str | None, directory: Path,
) -> None:  # fmt: skip
    """Show jobs sharing GPUs on a throw-away Slurm.

    Workloads that nobody knows come in on a real Slurm whose GPUs are emulated. Each has a GPU of its own in the first
    round and is measured there. Then the same queue comes again, under one policy after another. What each costs and
    saves is printed at the end. Nothing is entered beforehand.
    """
    names, shape = _names(policies), Queue(jobs, runs, mean_s, spread)
    if profiles is not None and pairs is None:
        raise BadInput("--profiles without --pairs", "Give the rates that go with them.")
    check_new_directory("--out", out)
    steps = Steps()
    stop_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    source = pairs.resolve() if pairs else _shipped_pairs(out)
    testbed = Testbed(directory, steps).up(Shape(nodes=gpus, gpus=1, shards=2), suite=suite)
    rounds: list[list[PaperResult]] = []
    told = _told(source, profiles)
    try:
        steps(f"{jobs} jobs of {mean_s:g} s, {jobs // runs} workloads, on {gpus} GPUs, {told}")
        for number in range(seed, seed + seeds):
            queue = paper_jobs(source, shape, number, profiles.resolve() if profiles else None)
            begun_s = time.time()
            experiment = TestbedRun(testbed, queue, _Bar())
            results: list[PaperResult] = []
            rounds.append(results)
            for result in experiment.rounds(names):
                last_s, begun_s = begun_s, time.time()  # each round begins when the one before has been told of
                results.append(result)
                steps(f"{result.policy}: all done after {result.makespan_s:.0f} s; {learned(result)}")
                _write(rounds, told, out)  # after each: an hour of running must not be lost
        page = write_run_page(testbed, last_s, out / "page.html", begun_s)
    finally:
        testbed.down(purge=True)
    click.echo("\n" + shown(rounds, told))
    _draw(rounds[0], out)
    click.echo(f"wrote table.txt, results.json and {page.name}, which is of {rounds[-1][-1].policy} alone, to {out}")


def _names(policies: str) -> list[str]:
    names = list(POLICIES) if policies == "all" else policies.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise BadInput(f"no policy '{unknown[0]}'", f"There are: {', '.join(POLICIES)}.")
    if AGAIN in names and OURS not in names:
        raise BadInput(f"{AGAIN} without {OURS}", "It starts from what the first round taught.")
    return [EXCLUSIVE, *(name for name in names if name != EXCLUSIVE)]


def _told(source: Path, profiles: Path | None) -> str:
    if profiles is None:
        return f"measured rates of {source.name}; telemetry inferred from them, so that cold figures prove nothing"
    return f"measured rates of {source.name}, measured telemetry of {profiles.name}"


class _Bar:
    """Live progress: one line that is rewritten on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._policy, self._next_s = "", 0.0

    def __call__(self, now: Progress) -> None:
        filled = round(BAR * now.done / now.total)
        line = (
            f"{now.policy:<14} [{'#' * filled}{'.' * (BAR - filled)}] {now.done:2}/{now.total} done, "
            f"{now.running} running, {now.pairs} pairs, {now.elapsed_s:.0f} s"
        )
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", err=True, nl=now.done == now.total)
        elif now.policy != self._policy or now.elapsed_s >= self._next_s or now.done == now.total:
            self._policy, self._next_s = now.policy, now.elapsed_s + 10.0
            click.echo(line, err=True)


def _write(rounds: Sequence[Sequence[PaperResult]], told: str, out: Path) -> None:
    (out / "table.txt").write_text(shown(rounds, told) + "\n")
    runs = [
        {"round": number, "policy": result.policy, "makespan_s": result.makespan_s}
        | {name: figure(result) for name, figure in FIGURES}
        | {"jobs": [_job(job) for job in result.jobs]}
        for number, results in enumerate(rounds)
        for result in results
    ]
    (out / "results.json").write_text(json.dumps({"told": told, "runs": runs}, indent=1, allow_nan=False) + "\n")


def _draw(results: Sequence[PaperResult], out: Path) -> None:
    from gpushare_lab.paper.rounds_plot import draw

    try:
        click.echo(f"wrote {draw(results, out / 'figure.png')}")
    except GpushareError as error:
        warn(f"no picture: {error}")


def _job(outcome: PolicyOutcome) -> dict[str, Any]:
    values = asdict(outcome)
    training = values.pop("training")
    return values | {"number": training["number"], "cluster": training["cluster"], "work_s": training["work_s"]}
