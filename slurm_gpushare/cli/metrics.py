"""``gpushare metrics``: figures for Prometheus through node_exporter's textfile collector."""

from __future__ import annotations

import time
from pathlib import Path

import click

from slurm_gpushare.atomic_files import replace_text
from slurm_gpushare.cli.access import readable_store, settings_or_defaults
from slurm_gpushare.cli.options import FILE
from slurm_gpushare.coschedule.view.occupancy import occupancy
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.report import metrics as figures
from slurm_gpushare.report.last_day import last_day
from slurm_gpushare.report.status import gpu_lines, tagged_jobs
from slurm_gpushare.slurm.interface import connect


@click.command()
@click.option(
    "--output", type=FILE, help="Write to this file instead of stdout; a reader sees the old file or the new one."
)
def metrics(output: Path | None) -> None:
    """Print figures for Prometheus, in node_exporter's textfile format."""
    config, slurm = settings_or_defaults(), connect()
    nodes, queue = slurm.nodes(), slurm.jobs()
    cards = occupancy(nodes, queue)
    store = readable_store(config)
    try:
        text = figures.metrics(
            gpu_lines(nodes, cards, frozenset(config.partitions)),
            tagged_jobs(queue, cards),
            store,
            last_day(store, config.promises, time.time()) if store else None,
            figures.spool_state(config.spool_dir),
        )
    finally:
        if store:
            store.close()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        replace_text(output, text)
    except OSError as why:
        raise GpushareError(f"{output}: cannot be written: {why.strerror}") from why
