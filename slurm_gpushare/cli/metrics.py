"""``gpushare metrics``: figures for Prometheus through node_exporter's textfile collector."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slurm_gpushare.cli.access import config_or_defaults, readable_store
from slurm_gpushare.coschedule.occupancy import occupancy
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.report import metrics as figures
from slurm_gpushare.report.status import gpu_lines, tagged_jobs
from slurm_gpushare.slurm.interface import connect


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file, at once or not at all, instead of stdout.",
)
def metrics(output: Path | None) -> None:
    """Print figures for Prometheus, in node_exporter's textfile format."""
    config, slurm = config_or_defaults(), connect()
    nodes, queue = slurm.nodes(), slurm.jobs()
    cards = occupancy(nodes, queue)
    store = readable_store(config)
    try:
        text = figures.metrics(
            gpu_lines(nodes, cards, frozenset(config.partitions if config else ())),
            tagged_jobs(queue, cards),
            store,
            figures.spool_state(config.spool_dir) if config else None,
        )
    finally:
        if store:
            store.close()
    if output is None:
        click.echo(text, nl=False)
        return
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(output)
    except OSError as why:
        partial.unlink(missing_ok=True)
        raise GpushareError(f"{output}: cannot be written: {why.strerror}") from why
