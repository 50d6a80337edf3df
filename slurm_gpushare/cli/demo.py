"""``gpushare demo``: the paper's experiment on a throw-away Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_gpushare.cli.output import Column, table
from slurm_gpushare.cli.testbed import Steps, stop_on_sigterm
from slurm_gpushare.errors import BadInput
from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.layout import Shape
from slurm_gpushare.testbed.paper import POLICIES, SHORT, Experiment, Progress, Result
from slurm_gpushare.testbed.paper_jobs import paper_jobs
from slurm_gpushare.testbed.rootfs import SUITES

if TYPE_CHECKING:
    from slurm_gpushare.cli.forecast import Forecast

BAR = 24


def _default_pairs() -> Path | None:
    """The measured V100 pairs, where they are."""
    path = Path(os.environ.get("GPUSHARE_DATA", "../shared/data")) / "v100_pairs.csv"
    return path.resolve() if path.is_file() else None


@click.command()
@click.option("--policies", default=",".join(SHORT), show_default=True,
              help=f"Which to compare, in this order, or 'all': {', '.join(POLICIES)}.")  # fmt: skip
@click.option("--jobs", "count", default=24, show_default=True, help="Jobs, a third of each cluster.")
@click.option("--gpus", default=4, show_default=True, help="GPUs, one a node.")
@click.option("--seconds", "mean_s", default=9.0, show_default=True, help="Mean time that a job takes alone.")
@click.option("--seed", default=0, show_default=True, help="Of the jobs and their order.")
@click.option("--pairs", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measured rates. Default: v100_pairs.csv in GPUSHARE_DATA, else the contention model.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Write the table and a picture to this directory.")  # fmt: skip
@click.option("--slurm", "suite", type=click.Choice(list(SUITES)),
              help="Run the Slurm of another Debian: bookworm 22.05, trixie 24.11, forky 26.05.")  # fmt: skip
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("/tmp/gpushare-demo"),
              show_default=True, help="The testbed's directory; it is removed at the end.")  # fmt: skip
def demo(
    policies: str, count: int, gpus: int, mean_s: float, seed: int, pairs: Path | None, out: Path | None,
    suite: str | None, directory: Path,
) -> None:  # fmt: skip
    """Show jobs sharing GPUs on a throw-away Slurm.

    The same jobs run under one policy after another on a real Slurm whose GPUs are emulated: alone on their GPUs,
    sharing first come first served, and placed by the helper. What each costs and saves is printed at the end.
    """
    names = list(POLICIES) if policies == "all" else policies.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise BadInput(f"no policy '{unknown[0]}'", f"There are: {', '.join(POLICIES)}.")
    source = pairs.resolve() if pairs else _default_pairs()
    jobs = paper_jobs(source, count, mean_s, seed)
    steps = Steps()
    stop_on_sigterm()
    testbed = Testbed(directory, steps).up(Shape(nodes=gpus, gpus=1, shards=2), suite=suite)
    results: list[Result] = []
    try:
        rates = "measured V100 rates" if source else "the built-in contention model"
        steps(f"{count} jobs of {mean_s:g} s on {gpus} GPUs, {rates}")
        experiment = Experiment(testbed, jobs, _Bar(steps))
        for name in names:
            results.append(experiment.run(name))
            _say(steps, results[-1])
    finally:
        testbed.down(purge=True)
    from slurm_gpushare.cli.forecast import forecasts, furthest_off_pct

    simulated = forecasts(jobs, gpus, results, seed)
    click.echo("\n" + _table(results, simulated))
    click.echo("\nISD: how much longer a job ran than alone. PS: GPU time saved against every job alone.")
    click.echo(
        "SIM_: the same jobs in the simulator, given the time that Slurm took to start them in the exclusive run:"
    )
    click.echo("makespan within {:.0f} %, mean JCT within {:.0f} %.".format(*furthest_off_pct(results, simulated)))
    if out is not None:
        _write(results, simulated, out)


class _Bar:
    """Live progress: one line that is rewritten on a terminal, else a line now and then."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next_s = 0.0

    def __call__(self, now: Progress) -> None:
        filled = round(BAR * now.done / now.total)
        line = (
            f"{now.policy:<10} [{'#' * filled}{'.' * (BAR - filled)}] {now.done:2}/{now.total} done, "
            f"{now.running} running, {now.pairs} pairs, {now.elapsed_s:.0f} s"
        )
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", err=True, nl=now.done == now.total)
        elif now.elapsed_s < 1.0 or now.elapsed_s >= self._next_s or now.done == now.total:
            self._next_s = now.elapsed_s + 10.0
            click.echo(line, err=True)


def _say(steps: Steps, result: Result) -> None:
    steps(f"{result.policy}: all done after {result.makespan_s:.0f} s")


def _table(results: Sequence[Result], simulated: Mapping[str, Forecast]) -> str:
    columns = [
        Column("POLICY"),
        Column("MAKESPAN_S", ".0f", "right"),
        Column("MEAN_JCT_S", ".1f", "right"),
        Column("PS%", ".1f", "right"),
        Column("ISD%", ".1f", "right"),
        Column("WORST_ISD%", ".1f", "right"),
        Column("SHARED", align="right"),
        Column("SIM_MAKESPAN_S", ".0f", "right"),
        Column("SIM_JCT_S", ".1f", "right"),
    ]
    return table(columns, [list(_figures(result, simulated[result.policy]).values()) for result in results])


def _figures(result: Result, simulated: Forecast) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "makespan_s": result.makespan_s,
        "mean_jct_s": result.mean_jct_s,
        "ps_pct": result.ps_pct,
        "isd_pct": result.isd_pct,
        "worst_isd_pct": result.worst_isd_pct,
        "shared": f"{result.shared}/{len(result.jobs)}",
        "simulated_makespan_s": simulated.makespan_s,
        "simulated_mean_jct_s": simulated.mean_jct_s,
    }


def _write(results: Sequence[Result], simulated: Mapping[str, Forecast], out: Path) -> None:
    import json

    from slurm_gpushare.testbed.paper_plot import draw

    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text(_table(results, simulated) + "\n")
    runs = [
        _figures(result, simulated[result.policy]) | {"jobs": [_job(job) for job in result.jobs]} for result in results
    ]
    (out / "results.json").write_text(json.dumps(runs, indent=1) + "\n")
    click.echo(f"wrote {out / 'table.txt'}, {out / 'results.json'} and {draw(results, out / 'figure.png')}")


def _job(outcome: Any) -> dict[str, Any]:
    values = asdict(outcome)
    training = values.pop("training")
    return values | {"number": training["number"], "cluster": training["cluster"], "work_s": training["work_s"]}
