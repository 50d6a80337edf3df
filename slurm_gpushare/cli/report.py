"""``gpushare report``: what was shared, what it cost each job and what it saved."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.files import check_page, write_page
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.text import (
    TO_SHARE,
    counted,
    duration_text,
    energy,
    hours,
    lines_text,
    period,
)
from slurm_gpushare.report.export import to_csv, to_json, to_sacct
from slurm_gpushare.report.job_figures import CpuSummary, Distribution
from slurm_gpushare.report.job_text import NOT_MEASURABLE
from slurm_gpushare.report.report_page import SHADOW_TITLE, known_cells, profile_points, render_report
from slurm_gpushare.report.sources import PublishedSource, Source, StoreSource, collect
from slurm_gpushare.report.summary import Report
from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.nodes import slurm_user

if TYPE_CHECKING:  # neither database nor simulator is on a login node
    from slurm_gpushare.store.store import Store
    from slurm_gpushare.whatif.shadow import Shadow


@click.command()
@click.option("-S", "--starttime", default="now-7days", show_default=True, help="Jobs of this time and later.")
@click.option("-E", "--endtime", default="now", show_default=True, help="Jobs up to this time.")
@click.option("-u", "--user", "users", default="", metavar="NAMES",
              help="Jobs of these users; yours unless you administer Slurm.")  # fmt: skip
@click.option("-A", "--account", "accounts", default="", metavar="NAMES", help="Jobs of these accounts.")
@click.option("-p", "--partition", "partitions", default="", metavar="NAMES",
              help="Jobs of these partitions; by default the shared ones.")  # fmt: skip
@console.SLURM_CLUSTERS
@console.JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line a job.")
@click.option("--format", "rows", type=click.Choice(["sacct"]),
              help="Print rows in sacct's columns, with fractions of GPUs.")  # fmt: skip
@console.HTML
@console.FORCE
def report(
    starttime: str, endtime: str, users: str, accounts: str, partitions: str, clusters: str,
    as_json: bool, as_csv: bool, rows: str | None, html: Path | None, force: bool,
) -> None:  # fmt: skip
    """Show what was shared, what it cost and what it saved.

    Figures come from accounting (one sacct call) and from the store, or, for users, from what the helper published.
    Users see their own jobs.
    """
    period = console.check_period(starttime, endtime)
    if as_json + as_csv + bool(rows) > 1:
        raise BadInput("--json, --csv and --format exclude each other")
    if html:
        check_page(html, force)
    uids = console.check_users(users)
    config, slurm = console.settings_or_defaults(), connect()
    console.check_partitions(slurm, partitions)
    users = _whose(slurm, users, uids)
    shown = partitions or ",".join(config.partitions)
    query = AccountingQuery(users=users, accounts=accounts, partitions=shown, slurm_clusters=clusters)
    figures = console.source(config, loud=True)
    if isinstance(figures, PublishedSource):
        figures.ask_about(uids or ({os.geteuid()} if users else set()))
    with console.progress("Reading accounting", 1) as bar:
        found = collect(slurm, figures, period, query, config)
        bar.update(1)
    if not found.jobs:  # nothing, or nothing possible?
        console.check_accounting_names(slurm, "account", accounts)
        console.check_accounting_names(slurm, "cluster", clusters)
    shadow = None
    if isinstance(figures, StoreSource) and not (
        users or accounts or clusters or as_csv or rows
    ):  # of a part none can tell
        shadow = _in_the_shadow(slurm, figures.store, config, found)
    if html:
        write_page(html, _page(slurm, figures, config, found, shadow))
    if as_json:
        console.echo_json(to_json(found) | ({"shadow": shadow.document()} if shadow else {}))
    elif as_csv:
        click.echo(to_csv(found), nl=False)
    elif rows:
        click.echo(to_sacct(found), nl=False)
    else:
        click.echo(report_text(found))
        if shadow:
            click.echo(f"\n{SHADOW_TITLE}\n{lines_text(*shadow.lines())}")
    if figures.note and found.jobs:
        console.warn(figures.note)


def _whose(slurm: Slurm, users: str, uids: set[int]) -> str:
    """Whose jobs are shown: plain users see their own, root and SlurmUser everybody's."""
    me = os.geteuid()
    if uids == {me} or me == 0 or slurm_user(slurm.config()).name == getpass.getuser():
        return users
    if uids:
        raise BadInput("users see their own jobs; those of others are for administrators", "Leave -u out.")
    return getpass.getuser()


def _page(slurm: Slurm, figures: Source, config: Config, found: Report, shadow: Shadow | None) -> str:
    store = figures.store if isinstance(figures, StoreSource) else None
    try:
        name = slurm.config().get("ClusterName", "")
    except SlurmError:  # a report of the past needs no slurmctld
        name = ""
    points, cells = profile_points(store) if store else [], known_cells(store, config.gpu_models)
    return render_report(found, points, cells, name, shadow.lines() if shadow else [])


def _in_the_shadow(slurm: Slurm, store: Store, config: Config, found: Report) -> Shadow | None:
    """What sharing would have done, where the helper only works it out and the simulator is installed."""
    try:
        from slurm_gpushare.whatif.shadow import shadow_of
    except ModuleNotFoundError:
        return None
    rows = [job.accounted for job in found.jobs if job.accounted]
    period_s = (found.start_s, found.end_s)
    return shadow_of(slurm, store, config, rows, period_s, partial(console.progress, "Simulating"))


# The report on a terminal: 80 columns, units that fit, and of how many jobs each figure speaks.


def report_text(found: Report) -> str:
    """All of it."""
    blocks = [f"GPU sharing, {period(found.start_s, found.end_s)}", _figures(found)]
    if found.pairs:
        columns = (
            "RESIDENT", "GUEST", "STAYS>", "MEASURED>", "TIME>",
            "ISD_RESIDENT%>.0f", "ISD_GUEST%>.0f", "PS%>.0f",
        )  # fmt: skip
        rows = (
            (p.resident_cluster, p.guest_cluster, p.spans, p.measured_spans, hours(p.hours), p.resident_isd_pct,
             p.guest_isd_pct, p.ps_pct)
            for p in found.pairs
        )  # fmt: skip
        blocks.append(f"By pair of clusters, while sharing\n{console.table(columns, rows)}")
    times = ("ROLE", "JOBS>", *(f"{name}>" for name in ("MEAN", "MEDIAN", "P95")))
    waits: list[Sequence[console.Cell]] = [
        (role, wait.count, *map(duration_text, (wait.mean, wait.median, wait.p95)))
        for role, wait in found.waits_s.items()
        if wait.count
    ]
    if waits:
        blocks.append(f"From submission to start\n{console.table(times, waits)}")
    if len(found.owners) > 1 and found.complete:
        by_user = (
            "USER", "JOBS>", "SHARED>", "SAVED>", "MEASURED>", "ISD%>.0f",
        )  # fmt: skip
        owners = (
            (o.user, o.jobs, o.shared, hours(o.gpu_hours_saved), o.measured, o.isd_mean_pct) for o in found.owners
        )
        blocks.append(f"By user\n{console.table(by_user, owners)}")
    return "\n\n".join(blocks)


def _figures(found: Report) -> str:
    jobs = f"{len(found.jobs)}, {found.profiled} were profiled"
    if not found.jobs:
        return lines_text(("GPU jobs", "none in this period"), ("to share", TO_SHARE))
    if not found.complete:
        return lines_text(("GPU jobs", jobs), ("shared", "--- (not known: see below)"))
    gpu_hours = f"{hours(found.accounted_gpu_h)} as accounting sees them, {hours(found.gpu_h)} as they were"
    if not found.shared:
        first = ("GPU jobs", f"{jobs}, none shared a card"), ("GPU hours", gpu_hours)
        return lines_text(*first, ("to share", TO_SHARE), *_cpus(found.cpus))
    isd, expected = found.isd_pct, found.expected_isd_pct
    saved = f"{hours(found.saved_gpu_h)}, {console.text_of(found.ps_pct, '.0f')} % of what they need alone (PS)"
    lines = [
        ("GPU jobs", f"{jobs}, {found.shared} shared a card"),
        ("GPU hours", gpu_hours),
        ("GPU time saved", f"{saved}; {found.measured_spans} of {len(found.spans)} stays measured"),
        ("slow-down (ISD)", f"measured of {isd.count} of {found.shared} jobs that shared: {_spread(isd)}"),
    ]
    if expected.count:
        lines.append(("", f"expected of {expected.count} that were not measured: {_spread(expected)}"))
    if found.predictions:
        error = f"{console.text_of(found.prediction_error_points, '.1f')} points off on average"
        lines.append(("predictions", f"{error}, of {found.predictions} jobs"))
    lines.append(("past promise", _broken(len(found.past_promise), isd.count)))
    if found.energy_kwh is not None:
        lines.append(("energy", f"{energy(found.energy_kwh)}, of the {found.measured_jobs} jobs measured"))
    if found.out_of_memory:
        lines.append(("out of memory", f"{found.out_of_memory} of the jobs that shared, of their GPU's"))
    if found.blind:
        lines.append(("under MPS", f"{found.blind} jobs shared cards that hide single jobs: {NOT_MEASURABLE}"))
    if found.given_back_jobs or found.pauses:
        given = f"{duration_text(found.given_back_s)} added to the time limits of {found.given_back_jobs} jobs"
        pauses = f"; {found.pauses} pauses to keep promises, {duration_text(found.paused_s)}" if found.pauses else ""
        lines.append(("given back", f"{given}{pauses}"))
    lines.append(("waiting avoided", "--- (no way to work it out has held on a real Slurm)"))
    if found.forecast_error_s.count:
        off = duration_text(found.forecast_error_s.median)
        lines.append(("forecasts", f"of {counted(found.forecast_error_s.count, 'start')}: half were at most {off} off"))
    return lines_text(*lines, *_cpus(found.cpus))


def _cpus(cpus: CpuSummary) -> Sequence[tuple[str, str]]:
    """One line, where somebody could do something about it."""
    if not (cpus.short or cpus.spare):
        return ()
    short = [f"the GPUs of {cpus.short} wait for more of them"] if cpus.short else []
    spare = [f"{cpus.spare} have some to spare, {cpus.spare_cpu_h:.0f} CPU hours in all"] if cpus.spare else []
    return (("CPUs", f"of {cpus.judged} jobs measured {' and '.join(short + spare)}; 'gpushare job ID' says how many"),)


def _broken(broken: int, measured: int) -> str:
    if broken:
        return console.styled(f"{broken} of {measured} jobs measured", "red")
    return f"none of {measured} jobs measured" if measured else "--- (no job was measured)"


def _spread(spread: Distribution) -> str:
    if spread.count == 0:
        return "---"
    if spread.count == 1:
        return f"{console.text_of(spread.mean, '.0f')} %"
    words = ((name, getattr(spread, name)) for name in ("mean", "median", "p95", "max"))
    return ", ".join(f"{name} {console.text_of(value, '.0f')} %" for name, value in words)
