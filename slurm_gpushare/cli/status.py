"""``gpushare status`` and ``gpushare jobs``: who is on which GPU, with whom, and what it costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import click

from slurm_gpushare.cli import console
from slurm_gpushare.helper.occupancy import occupancy
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import user_name
from slurm_gpushare.protocol.text import clock
from slurm_gpushare.report.export import gpu_json, queued_json
from slurm_gpushare.report.job_text import NOT_MEASURABLE
from slurm_gpushare.report.job_view import JobView
from slurm_gpushare.report.sources import LiveFigures, PublishedSource
from slurm_gpushare.report.status import GpuLine, gpu_lines, jobs_that_take_part
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.values import STATES, check_states, expand, names


def _each(values: Sequence[object], form: str = "") -> str | None:
    """Several jobs' values in one cell."""
    words = ["---" if value is None else format(value, form) for value in values]
    return ",".join(words) if words else None


GPU_FIELDS: dict[str, tuple[str, Callable[[GpuLine], console.Cell]]] = {
    "node": ("NODE", lambda line: line.node),
    "gpu": ("GPU>", lambda line: line.index),
    "model": ("MODEL", lambda line: line.model),
    "state": ("STATE", lambda line: line.state + ("+off" if line.off else "")),
    "shards": ("SHARDS>", lambda line: f"{line.shards_used}/{line.shards_total}"),
    "jobs": ("JOBS", lambda line: _each([t.key + ("*" if t.coming else "") for t in line.occupants])),
    "clusters": ("CLUSTER", lambda line: _each([t.cluster for t in line.occupants])),
    "util": ("UTIL%>.0f", lambda line: line.gpu_util_pct),
    "mem": ("MEM%>.0f", lambda line: line.mem_used_pct),
    "expected": ("EXP%", lambda line: _each([t.expected_isd_pct for t in line.occupants], ".0f")),
    "measured": ("ISD%", lambda line: _each([t.measured_isd_pct for t in line.occupants], ".0f")),
}
GPU_DEFAULT = tuple(name for name in GPU_FIELDS if name != "model")


def _why(job: JobView) -> console.Cell:
    """The helper's reason where there is one, else Slurm's."""
    return ("paused" if job.paused else job.told and job.told.reason) or job.reason


JOB_FIELDS: dict[str, tuple[str, Callable[[JobView], console.Cell]]] = {
    "jobid": ("JOBID", lambda job: job.key),
    "user": ("USER", lambda job: user_name(job.uid)[:8]),
    "name": ("NAME", lambda job: None),  # of the caller's own jobs alone: see `jobs --me`
    "partition": ("PARTITION", lambda job: job.partition),
    "state": ("ST", lambda job: STATES.get(job.state, job.state)),
    "time": ("TIME>", lambda job: clock(job.elapsed_s)),
    "cluster": ("CLUSTER>", lambda job: "new" if job.probe else job.cluster),
    "gpu": ("GPU", lambda job: job.card),
    "partner": ("BESIDE", lambda job: _each(job.partners)),
    "expected": ("EXP%>.0f", lambda job: job.expected_isd_pct),
    "measured": ("ISD%>.0f", lambda job: job.measured_isd_pct),
    "start": ("STARTS_IN>", lambda job: clock(job.told.wait_s if job.told else None)),
    "given": ("GIVEN>", lambda job: clock(job.given_back_s)),
    "reason": ("REASON", _why),
}
JOB_DEFAULT = ("jobid", "user", "state", "time", "cluster", "gpu", "partner", "expected", "measured", "reason")
OWN_DEFAULT = ("jobid", "name", "state", "time", "gpu", "partner", "expected", "measured", "start", "reason")
_NAME_WIDTH = 12


@click.command()
@click.option("-w", "--nodelist", default="", metavar="NODES", help="Only these nodes.")
@click.option("-p", "--partition", default="", metavar="NAMES", help="Only these partitions; default: the shared ones.")
@click.option("--watch", type=click.IntRange(1, 3600), metavar="SECONDS", help="Show it again every so many seconds.")
@console.listing(GPU_FIELDS, GPU_DEFAULT)
def status(nodelist: str, partition: str, watch: int | None, listing: console.Listing) -> None:
    """Show every GPU of the shared partitions: who is on it and what it costs.

    A job with * has been sent to that card and not started yet. EXP% and ISD% are its expected and its measured
    slow-down. Utilisation comes from the store, which only administrators can read; users see --- there.
    """
    config, slurm = console.settings_or_defaults(), connect()
    partitions = console.check_partitions(slurm, partition) or frozenset(config.partitions)
    wanted = frozenset(expand(nodelist))
    figures = console.source(config)
    hidden = isinstance(figures, PublishedSource) and not {"util", "mem"}.isdisjoint(listing.chosen)
    while True:
        nodes = slurm.nodes()
        console.check_names("node", wanted, (node.name for node in nodes))
        nodes = [node for node in nodes if not wanted or node.name in wanted]
        live = figures.live()
        lines = gpu_lines(nodes, occupancy(nodes, slurm.jobs()), partitions, time.time(), live)
        if watch:
            click.clear()
        if listing.as_json:
            console.echo_json([gpu_json(line) for line in lines])
        else:
            click.echo(listing.text(lines))
        if listing.for_people:
            click.echo(_summary(lines))
            for note in _notes(live, hidden):
                click.echo(console.wrapped(note))
        if figures.note and listing.header:
            console.warn(figures.note)
        if not watch:
            return
        time.sleep(watch)


def _summary(lines: Sequence[GpuLine]) -> str:
    counts = {state: sum(line.state == state for line in lines) for state in ("shared", "busy", "idle", "down")}
    words = ", ".join(f"{console.styled(str(count), 'cyan')} {state}" for state, count in counts.items() if count)
    return f"\n{len(lines)} GPUs" + (f": {words}" if words else "")


def _notes(live: LiveFigures, hidden: bool) -> Iterator[str]:
    """What is said below the table; `hidden`: this user does not see how busy the cards are."""
    if hidden:
        yield "UTIL% and MEM% are for administrators; 'gpushare job ID' has them for a job's owner."
    if live.holds is not None:
        counts = "{} won, {} lost to Slurm; kept for {:.1f} s in all".format(*live.holds)
        yield f"Cards that became empty for one of our jobs: {counts}."
    for card, why in sorted(live.off.items()):
        yield f"{card.node}:{card.index} is out of sharing" + (f": {why}" if why else ".")
    if hiding := sorted({job.card for job in live.jobs.values() if job.blind and job.card and job.beside}):
        yield f"Under MPS and hiding single jobs: {', '.join(hiding)}; {NOT_MEASURABLE}."
    if live.knowledge:
        yield f"The helper{f' on {live.host}' if live.host else ''} starts from {live.knowledge}."


@click.command()
@click.option("-u", "--user", "users", default="", metavar="NAMES", help="Only jobs of these users.")
@click.option("--me", is_flag=True, help="Only your own jobs, with their names.")
@click.option("-p", "--partition", default="", metavar="NAMES", help="Only jobs of these partitions.")
@click.option("-s", "--states", default="", metavar="NAMES", help="Only jobs in these states (PENDING, RUNNING, ...).")
@console.listing(JOB_FIELDS, JOB_DEFAULT)
def jobs(users: str, me: bool, partition: str, states: str, listing: console.Listing) -> None:
    """List the jobs that take part: place, neighbour, slow-down, why they wait.

    EXP% and ISD% are the expected and the measured slow-down. REASON is the helper's where it has one, else Slurm's:
    'gpushare job ID' says it in words. Names are shown to their owner alone, with --me.
    """
    if me and listing.chosen == JOB_DEFAULT:
        listing = replace(listing, chosen=OWN_DEFAULT)
    wanted_states, uids = check_states(states), console.check_users(users)
    if me and uids - {os.geteuid()}:
        raise BadInput("--me and -u of other users exclude each other")
    uids |= {os.geteuid()} if me else set()
    config, slurm = console.settings_or_defaults(), connect()
    partitions = console.check_partitions(slurm, partition)
    queue, figures = slurm.jobs(), console.source(config)
    found = [
        job
        for job in jobs_that_take_part(queue, occupancy(slurm.nodes(), queue), time.time(), figures.live())
        if (not uids or job.uid in uids)
        and (not wanted_states or job.state in wanted_states)
        and (not partitions or partitions & names(job.partition))
    ]
    own_names = slurm.own_job_names() if me and ("name" in listing.chosen or listing.as_json) else {}
    if listing.as_json:
        console.echo_json([queued_json(job) | ({"name": own_names.get(job.key)} if me else {}) for job in found])
    elif found or listing.header:
        width = None if listing.parsable else _NAME_WIDTH
        click.echo(listing.text(found, name=("NAME", lambda job: own_names.get(job.key, "")[:width])))
        if not found and listing.for_people:
            click.echo("No job in the queue that was asked for takes part in sharing.", err=True)
    if figures.note and listing.header:
        console.warn(figures.note)
