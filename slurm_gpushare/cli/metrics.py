"""``gpushare metrics``: figures for Prometheus through node_exporter's textfile collector."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from slurm_gpushare.cli.console import FILE, settings_or_defaults, warn
from slurm_gpushare.helper.occupancy import occupancy
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.files import replace_text
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.report import metrics as figures
from slurm_gpushare.report.job_view import JobView
from slurm_gpushare.report.status import GpuLine, gpu_lines, jobs_that_take_part
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.runner import SlurmMissing
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.store import Store


@click.command()
@click.option(
    "--output", type=FILE, help="Write to this file instead of stdout; a reader sees the old file or the new one."
)
def metrics(output: Path | None) -> None:
    """Print figures for Prometheus, in node_exporter's textfile format.

    Where the store cannot be read, gpushare_store_readable is 0, and what does not come from it is there all the same.
    Where slurmctld does not answer, what comes from it is missing.
    """
    config = settings_or_defaults()
    gpus, jobs = _from_slurm(config)
    stored = _from_store(config)
    beat_s, spool = _heartbeat_s(config.hook_file, stored), figures.spool_state(config.spool_dir)
    text = figures.metrics(gpus, jobs, stored, spool, beat_s)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        replace_text(output, text)
    except OSError as why:
        raise GpushareError(f"{output}: cannot be written: {why.strerror}") from why


def _from_slurm(config: Config) -> tuple[list[GpuLine] | None, list[JobView]]:
    """No GPUs, and a warning, if slurmctld does not answer: figures that stand still would look like good ones."""
    slurm, now_s = connect(), time.time()
    try:
        nodes, queue = slurm.nodes(), slurm.jobs()
    except SlurmMissing:
        raise
    except SlurmError as error:
        warn(f"{error} Figures that come from Slurm are left out.")
        return None, []
    cards = occupancy(nodes, queue)
    return gpu_lines(nodes, cards, frozenset(config.partitions), now_s), jobs_that_take_part(queue, cards, now_s)


def _from_store(config: Config) -> figures.StoreFigures | None:
    """None, and a warning, if it cannot be read."""
    try:
        with Store(config.store_url, read_only=True) as store:
            return figures.store_figures(store, config.promises, time.time())
    except GpushareError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - rows of a damaged store may hold anything
        why = f"the store holds what cannot be: {type(error).__name__}: {error}. Run 'gpushare db check'."
    if config.source is not None:  # else it was said already that nothing is set up
        warn(f"{why} Figures that come from it are left out.")
    return None


def _heartbeat_s(hook_file: Path, stored: figures.StoreFigures | None) -> int | None:
    """When the helper was last alive, by the hook's file or the store; None if neither is this user's to read.

    Each controller has a hook's file of its own, and the helper beats into that of one; a helper that was stopped has
    taken its beat back.
    """
    beat_s = HookFile(hook_file).heartbeat_s()
    if beat_s is None and stored is None and not os.access(hook_file, os.R_OK):
        return None
    return max(beat_s or 0, stored.heartbeat_s if stored else 0)
