"""``gpushare status`` and ``gpushare jobs``: who is on which GPU, with whom, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from slurm_gpushare.cli.access import config_or_defaults, readable_store
from slurm_gpushare.cli.output import Cell, Column, echo_json, styled, table
from slurm_gpushare.config import Config
from slurm_gpushare.coschedule.occupancy import occupancy
from slurm_gpushare.errors import BadInput
from slurm_gpushare.report.status import NOTHING_LIVE, GpuLine, Live, TaggedJob, gpu_lines, tagged_jobs
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.interface import connect


def _each(values: Sequence[object], form: str = "") -> str | None:
    """Several jobs' values in one cell."""
    words = ["---" if value is None else format(value, form) for value in values]
    return ",".join(words) if words else None


GPU_FIELDS: dict[str, tuple[Column, Callable[[GpuLine], Cell]]] = {
    "node": (Column("NODE"), lambda line: line.node),
    "gpu": (Column("GPU", align="right"), lambda line: line.index),
    "model": (Column("MODEL"), lambda line: line.model),
    "state": (Column("STATE"), lambda line: line.state),
    "shards": (Column("SHARDS", align="right"), lambda line: f"{line.shards_used}/{line.shards_total}"),
    "jobs": (Column("JOBS"), lambda line: _each([t.job_id + ("*" if t.coming else "") for t in line.tenants])),
    "clusters": (Column("CLUSTERS"), lambda line: _each([t.cluster for t in line.tenants])),
    "util": (Column("UTIL%", ".0f", "right"), lambda line: line.gpu_util_pct),
    "mem": (Column("MEM%", ".0f", "right"), lambda line: line.mem_used_pct),
    "predicted": (
        Column("ISD_PREDICTED%"),
        lambda line: _each([t.cost.predicted_isd_pct for t in line.tenants], ".0f"),
    ),
    "measured": (Column("ISD_MEASURED%"), lambda line: _each([t.cost.measured_isd_pct for t in line.tenants], ".0f")),
}

JOB_FIELDS: dict[str, tuple[Column, Callable[[TaggedJob], Cell]]] = {
    "jobid": (Column("JOBID"), lambda job: job.job_id),
    "partition": (Column("PARTITION"), lambda job: job.partition),
    "state": (Column("STATE"), lambda job: job.state),
    "cluster": (Column("CLUSTER", align="right"), lambda job: "probe" if job.probe else job.cluster),
    "gpu": (Column("GPU"), lambda job: job.card),
    "partner": (Column("BESIDE"), lambda job: _each(job.partners)),
    "predicted": (Column("ISD_PREDICTED%", ".0f", "right"), lambda job: job.cost.predicted_isd_pct),
    "measured": (Column("ISD_MEASURED%", ".0f", "right"), lambda job: job.cost.measured_isd_pct),
    "reason": (Column("REASON"), lambda job: job.reason),
}


def _chosen(names: str | None, known: Sequence[str]) -> list[str]:
    chosen = [name.strip().lower() for name in names.split(",")] if names else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise BadInput(f"no field '{unknown[0]}'", f"There are: {', '.join(known)}.")
    return chosen


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in text.split(",") if name)


def _live(config: Config | None) -> Live:
    store = readable_store(config, loud=False)
    if store is None:
        return NOTHING_LIVE
    from slurm_gpushare.report.live import read_live

    with store:
        return read_live(store)


@click.command()
@click.option("-w", "--nodelist", default="", metavar="NODES", help="Only these nodes.")
@click.option("-p", "--partition", default="", metavar="NAMES", help="Only these partitions; default: the shared ones.")
@click.option("-o", "--format", "fields", metavar="FIELDS", help=f"Columns: {','.join(GPU_FIELDS)}.")
@click.option("-n", "--noheader", is_flag=True, help="No header and no summary.")
@click.option("-P", "--parsable2", is_flag=True, help="Separate columns by | without padding.")
@click.option("--watch", type=click.IntRange(1, 3600), metavar="SECONDS", help="Show it again every so many seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(
    nodelist: str, partition: str, fields: str | None, noheader: bool, parsable2: bool, watch: int | None, as_json: bool
) -> None:
    """Show every GPU of the shared partitions: who is on it and what it costs.

    A job with * has been sent to that card and not started yet. Utilisation and slow-down come from the store, which
    only administrators can read; users see --- there.
    """
    chosen = _chosen(fields, list(GPU_FIELDS))
    config, slurm = config_or_defaults(), connect()
    partitions = _names(partition) or frozenset(config.partitions if config else ())
    wanted = frozenset(expand(nodelist))
    while True:
        nodes = [node for node in slurm.nodes() if not wanted or node.name in wanted]
        lines = gpu_lines(nodes, occupancy(nodes, slurm.jobs()), partitions, _live(config))
        if watch:
            click.clear()
        if as_json:
            echo_json([_as_json(line) for line in lines])
        else:
            columns = [GPU_FIELDS[name] for name in chosen]
            rows = [[value(line) for _, value in columns] for line in lines]
            click.echo(table([c for c, _ in columns], rows, header=not noheader, delimiter="|" if parsable2 else None))
            if not (noheader or parsable2):
                click.echo(_summary(lines))
        if not watch:
            return
        time.sleep(watch)


def _as_json(line: GpuLine) -> dict[str, object]:
    derived = {"state": line.state, "gpu_util_pct": line.gpu_util_pct, "mem_used_pct": line.mem_used_pct}
    return asdict(line) | derived


def _summary(lines: Sequence[GpuLine]) -> str:
    counts = {state: sum(line.state == state for line in lines) for state in ("shared", "busy", "idle", "down")}
    words = ", ".join(f"{styled(str(count), 'cyan')} {state}" for state, count in counts.items() if count)
    return f"\n{len(lines)} GPUs" + (f": {words}" if words else "")


@click.command()
@click.option("-u", "--user", "users", default="", metavar="NAMES", help="Only jobs of these users.")
@click.option("-p", "--partition", default="", metavar="NAMES", help="Only jobs of these partitions.")
@click.option("-s", "--states", default="", metavar="NAMES", help="Only jobs in these states (PENDING, RUNNING, ...).")
@click.option("-o", "--format", "fields", metavar="FIELDS", help=f"Columns: {','.join(JOB_FIELDS)}.")
@click.option("-n", "--noheader", is_flag=True, help="No header.")
@click.option("-P", "--parsable2", is_flag=True, help="Separate columns by | without padding.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def jobs(
    users: str, partition: str, states: str, fields: str | None, noheader: bool, parsable2: bool, as_json: bool
) -> None:
    """List the jobs that take part: cluster, place, partner, slow-down."""
    chosen = _chosen(fields, list(JOB_FIELDS))
    config, slurm = config_or_defaults(), connect()
    uids = {_uid(name) for name in _names(users)}
    wanted_states, partitions = {state.upper() for state in _names(states)}, _names(partition)
    queue = slurm.jobs()
    found = [
        job
        for job in tagged_jobs(queue, occupancy(slurm.nodes(), queue), _live(config))
        if (not uids or job.uid in uids)
        and (not wanted_states or job.state in wanted_states)
        and (not partitions or partitions & _names(job.partition))
    ]
    if as_json:
        echo_json([asdict(job) for job in found])
        return
    columns = [JOB_FIELDS[name] for name in chosen]
    rows = [[value(job) for _, value in columns] for job in found]
    click.echo(table([c for c, _ in columns], rows, header=not noheader, delimiter="|" if parsable2 else None))


def _uid(name: str) -> int:
    import pwd

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise BadInput(f"there is no user '{name}'") from None
