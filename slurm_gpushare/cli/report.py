"""``gpushare report``: what was shared, what it cost each job and what it saved."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare import __version__
from slurm_gpushare.cli.access import settings_or_defaults, source
from slurm_gpushare.cli.options import (
    FORCE,
    HTML,
    JSON,
    SLURM_CLUSTERS,
    check_accounting_names,
    check_partitions,
    check_period,
    check_users,
)
from slurm_gpushare.cli.output import check_page, echo_json, progress, warn, write_page
from slurm_gpushare.cli.report_text import report_text
from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.report.export import to_csv, to_json
from slurm_gpushare.report.pages import Origin
from slurm_gpushare.report.report_page import SHADOW_TITLE, known_cells, profile_points, render_report
from slurm_gpushare.report.sources import Filters, PublishedSource, Source, StoreSource, collect
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.text import lines_text
from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.nodes import slurm_user

if TYPE_CHECKING:
    from slurm_gpushare.cli.shadow_section import Shadow


@click.command()
@click.option("-S", "--starttime", default="now-7days", show_default=True, help="Jobs of this time and later.")
@click.option("-E", "--endtime", default="now", show_default=True, help="Jobs up to this time.")
@click.option("-u", "--user", "users", default="", metavar="NAMES",
              help="Jobs of these users; yours unless you administer Slurm.")  # fmt: skip
@click.option("-A", "--account", "accounts", default="", metavar="NAMES", help="Jobs of these accounts.")
@click.option("-p", "--partition", "partitions", default="", metavar="NAMES",
              help="Jobs of these partitions; by default the shared ones.")  # fmt: skip
@SLURM_CLUSTERS
@JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line a job.")
@HTML
@FORCE
def report(
    starttime: str, endtime: str, users: str, accounts: str, partitions: str, clusters: str,
    as_json: bool, as_csv: bool, html: Path | None, force: bool,
) -> None:  # fmt: skip
    """Show what was shared, what it cost and what it saved.

    Figures come from accounting (one sacct call) and from the store, or, for users, from what the helper published.
    Users see their own jobs.
    """
    period = check_period(starttime, endtime)
    if as_json and as_csv:
        raise BadInput("--json and --csv exclude each other")
    if html:
        check_page(html, force)
    uids = check_users(users)
    config, slurm = settings_or_defaults(), connect()
    check_partitions(slurm, partitions)
    users = _whose(slurm, users, uids)
    filters = Filters(users, accounts, partitions or ",".join(config.partitions), clusters)
    figures = source(config, loud=True)
    if isinstance(figures, PublishedSource):
        figures.ask_about(uids or ({os.geteuid()} if users else set()))
    with progress("Reading accounting", 1) as bar:
        found = collect(slurm, figures, period, filters, config.promises)
        bar.update(1)
    if not found.jobs:  # nothing, or nothing possible?
        check_accounting_names(slurm, "account", accounts)
        check_accounting_names(slurm, "cluster", clusters)
    shadow = None if users or accounts or as_csv else _shadow(slurm, figures, config, found)
    if html:
        write_page(html, _page(slurm, figures, config, found, shadow))
    if as_json:
        echo_json(to_json(found) | ({"shadow": shadow.document()} if shadow else {}))
    elif as_csv:
        click.echo(to_csv(found), nl=False)
    else:
        click.echo(report_text(found))
        if shadow:
            click.echo(f"\n{SHADOW_TITLE}\n{lines_text(*_shadow_lines(shadow))}")
    if figures.note and found.jobs:
        warn(figures.note)


def _whose(slurm: Slurm, users: str, uids: set[int]) -> str:
    """Whose jobs are shown: plain users see their own, administrators everybody's."""
    if uids == {os.geteuid()} or _administers(slurm):
        return users
    if uids:
        raise BadInput("users see their own jobs; those of others are for administrators", "Leave -u out.")
    return getpass.getuser()


def _page(slurm: Slurm, figures: Source, config: Config, found: Report, shadow: Shadow | None) -> str:
    store = figures.store if isinstance(figures, StoreSource) else None
    cells = known_cells(store, config.gpu_models)
    points = profile_points(store) if store else []
    return render_report(found, points, cells, _origin(slurm), _shadow_lines(shadow))


def _shadow(slurm: Slurm, figures: Source, config: Config, found: Report) -> Shadow | None:
    """What sharing would have done, for who may read the store; of part of the queue it cannot be told."""
    if not isinstance(figures, StoreSource):
        return None
    try:
        from slurm_gpushare.cli.shadow_section import shadow_of
    except ModuleNotFoundError:  # the simulator needs numpy
        return None
    return shadow_of(slurm, figures.store, config, found)


def _shadow_lines(shadow: Shadow | None) -> list[tuple[str, str]]:
    """What sharing would have done, line by line; none where nothing was in the shadow."""
    if shadow is None:
        return []
    from slurm_gpushare.cli.shadow_section import shadow_lines

    return shadow_lines(shadow)


def _origin(slurm: Slurm) -> Origin:
    try:
        name = slurm.config().get("ClusterName", "")
    except SlurmError:  # a report of the past needs no slurmctld
        name = ""
    return Origin(name, __version__, shlex.join(["gpushare", *sys.argv[1:]]))


def _administers(slurm: Slurm) -> bool:
    """Root and SlurmUser see everybody's jobs."""
    if os.geteuid() == 0:
        return True
    return slurm_user(slurm.config()).name == getpass.getuser()
