"""``gpushare report``: what was shared, what it cost each job and what it saved."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_gpushare import __version__
from slurm_gpushare.cli.console import (
    FORCE,
    HTML,
    JSON,
    SLURM_CLUSTERS,
    Cell,
    Column,
    check_accounting_names,
    check_page,
    check_partitions,
    check_period,
    check_users,
    echo_json,
    progress,
    right,
    settings_or_defaults,
    source,
    styled,
    table,
    text_of,
    warn,
    write_page,
)
from slurm_gpushare.helper.explain import SHADOW
from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.text import (
    TO_SHARE,
    counted,
    duration_text,
    durations,
    energy,
    hours,
    hours_span,
    lines_text,
    period,
    span,
)
from slurm_gpushare.report.export import to_csv, to_json
from slurm_gpushare.report.job_figures import CpuSummary, Distribution
from slurm_gpushare.report.job_text import NOT_MEASURABLE
from slurm_gpushare.report.pages import Origin
from slurm_gpushare.report.report_page import SHADOW_TITLE, known_cells, profile_points, render_report
from slurm_gpushare.report.sources import Filters, PublishedSource, Source, StoreSource, collect
from slurm_gpushare.report.summary import Report
from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.nodes import slurm_user

if TYPE_CHECKING:  # neither database nor simulator is on a login node
    from slurm_gpushare.store.store import Store
    from slurm_gpushare.whatif.shadow import ShadowFigures


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
    if isinstance(figures, StoreSource) and not (users or accounts or clusters):  # of part of the queue nobody can tell
        found = replace(found, waiting_avoided_h=_waiting_avoided_h(slurm, config, found))
    if not found.jobs:  # nothing, or nothing possible?
        check_accounting_names(slurm, "account", accounts)
        check_accounting_names(slurm, "cluster", clusters)
    shadow = None
    if isinstance(figures, StoreSource) and not (users or accounts or as_csv):  # of part of the queue none can tell
        shadow = shadow_of(slurm, figures.store, config, found)
    if html:
        write_page(html, _page(slurm, figures, config, found, shadow))
    if as_json:
        echo_json(to_json(found) | ({"shadow": shadow.document()} if shadow else {}))
    elif as_csv:
        click.echo(to_csv(found), nl=False)
    else:
        click.echo(report_text(found))
        if shadow:
            click.echo(f"\n{SHADOW_TITLE}\n{lines_text(*shadow_lines(shadow))}")
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
    try:
        name = slurm.config().get("ClusterName", "")
    except SlurmError:  # a report of the past needs no slurmctld
        name = ""
    origin = Origin(name, __version__, shlex.join(["gpushare", *sys.argv[1:]]))
    points, cells = profile_points(store) if store else [], known_cells(store, config.gpu_models)
    return render_report(found, points, cells, origin, shadow_lines(shadow) if shadow else [])


def _waiting_avoided_h(slurm: Slurm, config: Config, found: Report) -> tuple[float, float] | None:
    """By the jobs of the report that have started, on the GPUs that share; None where there is no simulator."""
    try:
        from slurm_gpushare.whatif.assess import cards_of
        from slurm_gpushare.whatif.waiting import WaitedJob, waiting_avoided_h
    except ModuleNotFoundError:
        return None
    jobs = [
        WaitedJob(
            max(row.submit_s, row.eligible_s or 0), row.start_s, (job.wall_s or 0.0) / (1.0 + slower_pct / 100.0),
            cards_of(row),
        )
        for job in found.jobs
        if (row := job.accounted) and row.start_s is not None
        for slower_pct in [job.measured_isd_pct or job.expected_isd_pct or 0.0]
    ]  # fmt: skip
    gpus = _gpus(slurm, config)
    band = None if gpus is None else waiting_avoided_h(jobs, gpus, found.start_s, found.end_s)
    return None if band is None else (band.low, band.high)


def _administers(slurm: Slurm) -> bool:
    """Root and SlurmUser see everybody's jobs."""
    return os.geteuid() == 0 or slurm_user(slurm.config()).name == getpass.getuser()


# The report on a terminal: 80 columns, units that fit, and of how many jobs each figure speaks.


def report_text(found: Report) -> str:
    """All of it."""
    blocks = [f"GPU sharing, {period(found.start_s, found.end_s)}", _figures(found)]
    if found.pairs:
        columns = (
            Column("RESIDENT"), Column("GUEST"), right("STAYS"), right("MEASURED"),
            right("TIME"),
            right("ISD_RESIDENT%", ".0f"), right("ISD_GUEST%", ".0f"), right("PS%", ".0f"),
        )  # fmt: skip
        rows = (
            (p.resident_cluster, p.guest_cluster, p.spans, p.measured_spans, hours(p.hours), p.resident_isd_pct,
             p.guest_isd_pct, p.ps_pct)
            for p in found.pairs
        )  # fmt: skip
        blocks.append(f"By pair of clusters, while sharing\n{table(columns, rows)}")
    times = (Column("ROLE"), right("JOBS"), *(right(name) for name in ("MEAN", "MEDIAN", "P95")))
    waits: list[Sequence[Cell]] = [
        (role, wait.count, *map(duration_text, (wait.mean, wait.median, wait.p95)))
        for role, wait in found.waits_s.items()
        if wait.count
    ]
    if waits:
        blocks.append(f"From submission to start\n{table(times, waits)}")
    if len(found.owners) > 1 and found.complete:
        by_user = (
            Column("USER"), right("JOBS"), right("SHARED"), right("SAVED"),
            right("MEASURED"), right("ISD%", ".0f"),
        )  # fmt: skip
        owners = (
            (o.user, o.jobs, o.shared, hours(o.gpu_hours_saved), o.measured, o.isd_mean_pct) for o in found.owners
        )
        blocks.append(f"By user\n{table(by_user, owners)}")
    return "\n\n".join(blocks)


def _figures(found: Report) -> str:
    jobs = f"{len(found.jobs)}, {found.profiled} were profiled"
    if not found.jobs:
        return lines_text(("GPU jobs", "none in this period"), ("to share", TO_SHARE))
    if not found.complete:
        return lines_text(("GPU jobs", jobs), ("shared", "--- (not known: see below)"))
    if not found.shared:
        return lines_text(("GPU jobs", f"{jobs}, none shared a card"), ("to share", TO_SHARE), *_cpus(found.cpus))
    isd, expected = found.isd_pct, found.expected_isd_pct
    saved = f"{hours(found.saved_gpu_h)}, {text_of(found.ps_pct, '.0f')} % of what they need alone (PS)"
    lines = [
        ("GPU jobs", f"{jobs}, {found.shared} shared a card"),
        ("GPU time saved", f"{saved}; {found.measured_spans} of {len(found.spans)} stays measured"),
        ("slow-down (ISD)", f"measured of {isd.count} of {found.shared} jobs that shared: {_spread(isd)}"),
    ]
    if expected.count:
        lines.append(("", f"expected of {expected.count} that were not measured: {_spread(expected)}"))
    if found.predictions:
        error = f"{text_of(found.prediction_error_points, '.1f')} points off on average"
        lines.append(("predictions", f"{error}, of {found.predictions} jobs"))
    lines.append(("past promise", _broken(len(found.past_promise), isd.count)))
    if found.energy_kwh is not None:
        lines.append(("energy", f"{energy(found.energy_kwh)}, of the {found.measured_jobs} jobs measured"))
    if found.out_of_memory:
        lines.append(("out of memory", f"{found.out_of_memory} of the jobs that shared"))
    if found.blind:
        lines.append(("under MPS", f"{found.blind} jobs shared cards that hide single jobs: {NOT_MEASURABLE}"))
    if found.given_back_jobs or found.pauses:
        given = f"{duration_text(found.given_back_s)} added to the time limits of {found.given_back_jobs} jobs"
        pauses = f"; {found.pauses} pauses to keep promises, {duration_text(found.paused_s)}" if found.pauses else ""
        lines.append(("given back", f"{given}{pauses}"))
    low_high = dict(zip(("low", "high"), found.waiting_avoided_h or (), strict=False))
    avoided = f"{hours_span(low_high)}, by plain Slurm on the same jobs" if low_high else "--- (not worked out)"
    lines.append(("waiting avoided", avoided))
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
        return styled(f"{broken} of {measured} jobs measured", "red")
    return f"none of {measured} jobs measured" if measured else "--- (no job was measured)"


def _spread(spread: Distribution) -> str:
    if spread.count == 0:
        return "---"
    if spread.count == 1:
        return f"{text_of(spread.mean, '.0f')} %"
    words = ((name, getattr(spread, name)) for name in ("mean", "median", "p95", "max"))
    return ", ".join(f"{name} {text_of(value, '.0f')} %" for name, value in words)


# The report's section "in the shadow": what sharing would have done while ``Policy=shadow``.


@dataclass(frozen=True, slots=True)
class Shadow:
    """What the helper recorded, and what the simulator makes of the period."""

    recorded: Mapping[str, int]
    """Jobs that the helper would have placed, by how, at the first moment at which it would have."""
    figures: ShadowFigures | None
    """None where no job of the period has ended."""

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"recorded": dict(self.recorded), "simulated": asdict(self.figures) if self.figures else None}


def shadow_of(slurm: Slurm, store: Store, config: Config, report: Report) -> Shadow | None:
    """The section, where the period was in the shadow at least in part, and the simulator is installed."""
    try:
        from slurm_gpushare.whatif.assess import cards_of, past_job
        from slurm_gpushare.whatif.shadow import MOST_JOBS, RUNS, in_the_shadow, known_tokens, token_of
    except ModuleNotFoundError:  # the simulator needs numpy
        return None

    decisions = store.decisions.between(report.start_s, report.end_s)
    recorded = Counter(str(item.reasons.get("how", "")) for item in decisions if item.kind == SHADOW)
    if not recorded and config.policy != SHADOW:
        return None
    jobs = [job.accounted for job in report.jobs]
    ended = [job for job in jobs if job and job.start_s and job.end_s and job.elapsed_s > 0 and cards_of(job)]
    past = [replace(past_job(job), token=token_of(job), limit_s=job.limit_s) for job in ended]
    settings = replace(PolicySettings.from_config(config), policy="gpushare")
    known = known_tokens(store, config, ended)
    with progress("Simulating", RUNS * min(len(past), MOST_JOBS)) as bar:
        return Shadow(recorded, in_the_shadow(past, known, settings, _gpus(slurm, config), bar.update))


def _gpus(slurm: Slurm, config: Config) -> int | None:
    """GPUs of the nodes that share; None where slurmctld does not answer."""
    try:
        nodes = slurm.nodes()
    except SlurmError:
        return None
    return sum(len(node.gpus) for node in nodes if set(node.partitions) & set(config.partitions)) or None


def shadow_lines(shadow: Shadow) -> list[tuple[str, str]]:
    """The section's lines, name and text."""
    from slurm_gpushare.whatif.shadow import SLOWED_PCT

    placed = sum(shadow.recorded.values())
    beside = placed - shadow.recorded.get("alone", 0) - shadow.recorded.get("unshared", 0)
    lines = [
        ("recorded", f"{placed} jobs would have been placed, {beside} of them beside another; nothing was changed")
    ]
    found = shadow.figures
    if found is None:
        return [*lines, ("simulated", "--- (no job has ended)")]
    band = asdict(found)
    return [
        *lines,
        ("simulated", f"{found.jobs} of {found.all_jobs} jobs that ended, on {found.gpus} GPUs;"
         f" {found.takes_part} would take part"),
        ("would share", f"{span(band['shared_jobs'])} jobs"),
        ("would save", f"{span(band['saved_gpu_h'], ',.1f', ' h')} of {found.gpu_hours:,.1f} GPU hours,"
         f" {span(band['saved_pct'], '.0f', ' %')}"),
        ("slow-down (ISD)", f"mean {span(band['isd_mean_pct'], '.0f', ' %')}, p95"
         f" {span(band['isd_p95_pct'], '.0f', ' %')} of those that would share;"
         f" {span(band['slowed_jobs'])} jobs by more than {SLOWED_PCT:.0f} %"),
        ("mean wait", f"{durations(band['wait_s'])} with sharing, {duration_text(found.plain_wait_s)} in the simulator"
         f" without; they really waited {duration_text(found.observed_wait_s)}"),
        ("the range", "how fast two jobs run side by side was predicted, not seen: from the pessimistic end of what is"
         " believed to as far above its mean"),
    ]  # fmt: skip
