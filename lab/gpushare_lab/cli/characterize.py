"""``gpushare-lab characterize``: the paper's figures 2 to 4, from its table of workloads."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gpushare_lab.cli.checks import check_new_directory
from gpushare_lab.paper import plots
from gpushare_lab.paper.characterize import THIRD
from gpushare_lab.paper.characterize import characterize as run
from slurm_gpushare.cli.console import table, warn
from slurm_gpushare.knowledge.tables import write_text
from slurm_gpushare.protocol.errors import BadInput


@click.command("characterize")
@click.argument("workloads", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for summary, model and figures.")
@click.option("-k", "k", type=int, help="Number of clusters; the elbow chooses unless given.")
@click.option("--seed", default=0, show_default=True, help="Seed of K-means and of the random forest.")
def characterize(workloads: Path, out: Path, k: int | None, seed: int) -> None:
    """Characterise public workloads as the paper does.

    Drops the user-sensitive columns of WORKLOADS, ranks the attributes that tell GPU utilisation and memory, enlarges
    the data by interpolation over batch size, clusters them and draws figures 2 to 4. Writes summary.json, model.json
    and PNG files to the output directory.
    """
    check_new_directory("--out", out)
    result = run(workloads, k=k, seed=seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out}: cannot be made: {error.strerror}") from error
    write_text(out / "summary.json", json.dumps(result.summary(), indent=2, allow_nan=False) + "\n")
    write_text(out / "model.json", json.dumps(result.model.to_json(), indent=2, allow_nan=False) + "\n")
    click.echo(f"dropped, user-sensitive: {', '.join(result.workloads.dropped)}")
    click.echo(f"dropped, constant:       {', '.join(result.workloads.constant) or 'none'}")
    for target, items in result.rankings.items():
        click.echo(f"most telling of {target}: {', '.join(item.attribute for item in items[:5])}")
    places = ", ".join(f"place {result.place_of_third(target)} for {target}" for target in result.rankings)
    click.echo(f"third feature: {THIRD.upper()}, chosen on the ranking for MGUP ({places})")
    click.echo(f"{len(result.workloads.values)} workloads, {len(result.points)} points by {result.method}")
    rows = [
        (number, *(float(value) for value in row), size)
        for number, (row, size) in enumerate(zip(result.model.centroids, result.model.sizes, strict=True))
    ]
    heads = [f"{name.upper()}>.1f" for name in result.model.features]
    click.echo(table(["CLUSTER>", *heads, "SIZE>"], rows))
    elbows: dict[int, list[int]] = {}
    for largest, found in result.choice.elbows.items():
        elbows.setdefault(found, []).append(largest)
    told = "; ".join(f"{found} where the largest k tried is {_span(tried)}" for found, tried in elbows.items())
    best = max(result.choice.silhouettes, key=lambda number: result.choice.silhouettes[number])
    click.echo(f"the elbow is {told}. The silhouette is highest at k = {best}.")
    if plots.available():
        for path in plots.characterisation(result, out):
            click.echo(f"wrote {path}")
    else:
        warn("no figures: matplotlib is not installed. Install it with: pip install 'slurm-gpushare[plots]'.")


def _span(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else str(numbers[0])
