"""``gpushare ingest``: take waiting telemetry records into the store."""

from __future__ import annotations

import click

from slurm_gpushare.cli.access import settings
from slurm_gpushare.cli.options import JSON
from slurm_gpushare.cli.output import echo_json, warn


@click.command("ingest")
@JSON
def ingest(as_json: bool) -> None:
    """Take waiting telemetry records into the store.

    The helper does this by itself every tick. Records that cannot be used are moved to rejected/ in the spool
    directory, with the reason beside them; records of jobs that Slurm does not know yet wait.
    """
    from slurm_gpushare.helper.housekeeping import make_ingest
    from slurm_gpushare.slurm.accounting import JobTokens
    from slurm_gpushare.slurm.commands import connect
    from slurm_gpushare.store import Store

    config = settings()
    with Store(config.store_url) as store:
        summary = make_ingest(config, store, JobTokens(connect())).run_all()
    counts = {name: summary.counts[name] for name in _WORDS}
    if as_json:
        echo_json({**counts, "waiting": summary.waiting, "restarts": summary.restarts})
        return
    told = [f"{count} {_WORDS[name]}" for name, count in counts.items() if count]
    told += [f"{summary.waiting} jobs that Slurm does not know yet"] if summary.waiting else []
    click.echo("gpushare: ingest: " + (", ".join(told) or "nothing new"))
    for line in summary.restarts:
        warn(line)


_WORDS = {
    "final": "runs",
    "interim": "interim records",
    "duplicate": "seen before",
    "rejected": "rejected",
    "excess": "removed unread (too many of one user)",
    "stray": "strays removed",
    "stuck": "that cannot be removed",
    "ignored": "ignored",
    "counted": "counted in profiles",
    "kept": "kept beside profiles",
    "untokened": "of jobs without a token",
    "foreign": "for somebody else's token",
    "outranked": "outranked by a node's",
}
