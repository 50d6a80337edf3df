"""``gpushare report``: what was shared, what it cost each job and what it saved."""

from __future__ import annotations

import getpass
import os
import pwd
from dataclasses import astuple
from datetime import datetime
from pathlib import Path

import click

from slurm_gpushare.cli.access import config_or_defaults, readable_store
from slurm_gpushare.cli.output import Column, echo_json, progress, styled, table, text_of
from slurm_gpushare.errors import BadInput, GpushareError
from slurm_gpushare.report.collect import Filters, Period, collect, profile_points, shipped_cells
from slurm_gpushare.report.export import to_csv, to_json
from slurm_gpushare.report.page import render
from slurm_gpushare.report.summary import Promise, Report, Spread
from slurm_gpushare.slurm.interface import Slurm, connect
from slurm_gpushare.slurm.times import parse_time


@click.command()
@click.option("-S", "--starttime", default="now-7days", show_default=True, help="Jobs of this time and later.")
@click.option("-E", "--endtime", default="now", show_default=True, help="Jobs up to this time.")
@click.option(
    "-u", "--user", "users", default="", metavar="NAMES", help="Jobs of these users; yours unless you administer Slurm."
)
@click.option("-A", "--account", "accounts", default="", metavar="NAMES", help="Jobs of these accounts.")
@click.option(
    "-p",
    "--partition",
    "partitions",
    default="",
    metavar="NAMES",
    help="Jobs of these partitions; by default the shared ones.",
)
@click.option("-M", "--clusters", default="", metavar="NAMES", help="Jobs of these Slurm clusters.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line a job.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page to this file."
)
@click.option("--force", is_flag=True, help="Let --html replace a file that exists.")
def report(
    starttime: str, endtime: str, users: str, accounts: str, partitions: str, clusters: str,
    as_json: bool, as_csv: bool, html: Path | None, force: bool,
) -> None:  # fmt: skip
    """Show what was shared, what it cost and what it saved.

    Figures come from accounting (one sacct call) and from the store. Users see their own jobs, and without access
    to the store only what accounting knows.
    """
    now = datetime.now()
    period = Period(parse_time(starttime, now), parse_time(endtime, now))
    if period.end <= period.start:
        raise BadInput(f"the period is empty: it ends ({endtime}) before it starts ({starttime})")
    if as_json and as_csv:
        raise BadInput("--json and --csv exclude each other")
    if html and html.exists() and not force:
        raise BadInput(f"{html}: exists already", "Name another file, or add --force.")
    _check_users(users)
    config, slurm = config_or_defaults(), connect()
    if not users and not _administers(slurm):
        users = getpass.getuser()
    filters = Filters(users, accounts, partitions or ",".join(config.partitions if config else ()), clusters)
    promise = Promise(config.resident_budget_pct, config.guest_cap_pct) if config else Promise(25.0, 50.0)
    store = readable_store(config)
    try:
        with progress("Reading accounting", 2) as bar:
            found = collect(slurm, store, period, filters, promise)
            bar.update(1)
            points = profile_points(store) if store and html else []
            bar.update(1)
    finally:
        if store:
            store.close()
    if html:
        _write(html, render(found, points, [shipped_cells()]))
    if as_json:
        echo_json(to_json(found))
    elif as_csv:
        click.echo(to_csv(found), nl=False)
    else:
        _print(found)


def _check_users(users: str) -> None:
    for name in filter(None, users.split(",")):
        try:
            pwd.getpwnam(name)
        except KeyError:
            if not name.isdecimal():
                raise BadInput(f"there is no user '{name}'") from None


def _administers(slurm: Slurm) -> bool:
    """Root and SlurmUser see everybody's jobs."""
    if os.geteuid() == 0:
        return True
    return slurm.config().get("SlurmUser", "").partition("(")[0] == getpass.getuser()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as why:
        raise GpushareError(f"{path}: cannot be written: {why.strerror}") from why


def _number(name: str, form: str = ".1f") -> Column:
    return Column(name, form, "right")


def _print(found: Report) -> None:
    moments = (datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M") for t in (found.start_s, found.end_s))
    click.echo(f"GPU sharing, {' to '.join(moments)}\n")
    broken = len(found.past_promise)
    lines: tuple[tuple[str, str], ...] = (
        ("GPU jobs", f"{len(found.jobs)}, {found.shared} shared a card, {found.profiled} were profiled"),
        ("GPU time saved", f"{text_of(found.saved_gpu_h, '.1f')} h, PS {text_of(found.ps_pct, '.1f')} %"),
        ("slow-down (ISD)", _spread(found.isd_pct, "%")),
        ("predictions", f"{text_of(found.prediction_error_points, '.1f')} points off on average"),
        ("past promise", styled(f"{broken} jobs", "red") if broken else "no job"),
        ("wait avoided", f"{text_of(found.wait_avoided_h, '.1f')} h expected, all guests together"),
    )
    for name, text in lines:
        click.echo(f"{name:<16}  {text}")
    if found.pairs:
        click.echo("\nBy pair of clusters, while sharing")
        columns = (
            Column("RESIDENT"), Column("GUEST"), _number("TIMES", ""), _number("HOURS"), _number("ISD_RESIDENT%"),
            _number("ISD_GUEST%"), _number("PS%"),
        )  # fmt: skip
        click.echo(table(columns, (astuple(pair) for pair in found.pairs)))
    click.echo("\nMinutes from submission to start")
    rows = (
        (role, wait.count, *map(_minutes, (wait.mean, wait.median, wait.p95))) for role, wait in found.waits_s.items()
    )
    click.echo(table((Column("JOBS"), _number("COUNT", ""), _number("MEAN"), _number("MEDIAN"), _number("P95")), rows))
    if len(found.owners) > 1:
        click.echo("\nBy user")
        by_user = (Column("USER"), _number("JOBS", ""), _number("SHARED", ""), _number("SAVED_H"), _number("ISD%"))
        click.echo(table(by_user, (astuple(owner) for owner in found.owners)))


def _minutes(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 60


def _spread(spread: Spread, unit: str) -> str:
    words = ((name, getattr(spread, name)) for name in ("mean", "median", "p95", "max"))
    return ", ".join(f"{name} {text_of(value, '.1f')} {unit}" for name, value in words)
