"""``gpushare assess``: what would sharing do here? From sacct alone, before anything is changed in Slurm."""

from __future__ import annotations

import getpass
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import check_page, write_page
from slurm_gpushare.protocol.text import WIDTH, duration_text, durations, hours, hours_span, span
from slurm_gpushare.report.pages import isd, remarks, render_assessment, why_nobody_shares
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.runner import ControllerDown
from slurm_gpushare.whatif.assess import (
    DRAWS,
    MOST_JOBS,
    Assessment,
    Band,
    PastJob,
    assess_partition,
    cards_of,
    past_job,
)
from slurm_gpushare.whatif.traces import MECHANISMS

PIECE = timedelta(days=31)
"""A month is one question; longer periods are asked for in pieces, since an answer is in memory as a whole: about 2 KiB
a job."""
LEAST_PIECE = timedelta(days=7)
"""A piece that slurmdbd does not answer in time is asked for in halves, down to about this."""
MOST_GPUS, MOST_S = 1_000_000, 1e10
"""Of one job of a trace; more is a damaged file."""
SECONDS = "%Y-%m-%dT%H:%M:%S"
METHOD = (
    "The jobs ran again in the simulator that the plan itself is tested with, first each on whole GPUs in the order of"
    " submission, then under this project's policy. What the jobs are is unknown, so each user's were given some of 26"
    " workloads that were measured in pairs on a V100, {draws} times anew; only time limits were known to the plan."
    " Whether those rates are of a card under MPS is not known: without MPS a card takes turns, and --mechanism slices"
    " says what that would be."
    " The number of GPUs is the most that were in use at once, unless it was given. Priorities, reservations and nodes"
    " are left out: compare the waits in the simulator without sharing with those that were really seen."
)


@click.command()
@click.option("-S", "--starttime", default="now-30days", show_default=True, help="Jobs of this time and later.")
@click.option("-E", "--endtime", default="now", show_default=True, help="Jobs up to this time.")
@click.option("-p", "--partition", "partitions", default="", metavar="NAMES", help="Only these partitions.")
@console.SLURM_CLUSTERS
@click.option("--trace", type=console.FILE, help="A trace instead of sacct: ours, Philly's, Alibaba's PAI or openb.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of each partition; default: the most in use at once.")
@click.option("--opt-in", "opt_in_pct", type=click.FloatRange(0, 100), default=100.0, show_default=True,
              metavar="PERCENT", help="Users who take part.")  # fmt: skip
@click.option(
    "--mechanism",
    type=click.Choice(MECHANISMS),
    default=MECHANISMS[0],
    show_default=True,
    help="slices: take the measured rates as those of MPS, and scale them to time slices; mps: the other way.",
)
@click.option("--draws", type=click.IntRange(1, 100), default=DRAWS, show_default=True, help="How often to draw.")
@click.option("--jobs", "most_jobs", type=click.IntRange(1), default=MOST_JOBS, show_default=True,
              help="Only the last so many jobs of a partition.")  # fmt: skip
@console.JSON
@console.HTML
@console.FORCE
def assess(
    starttime: str, endtime: str, partitions: str, clusters: str, trace: Path | None, gpus: int | None,
    opt_in_pct: float, mechanism: str, draws: int, most_jobs: int, as_json: bool, html: Path | None, force: bool,
) -> None:  # fmt: skip
    """Say what sharing would do here, from the site's own history.

    Reads sacct alone, so that it can be run before anything is changed in Slurm, on any machine that has sacct. The
    simulator is needed: the package slurm-gpushare-controller, or a virtual environment with
    'pip install slurm-gpushare[controller]'. slurm-gpushare alone, as on login nodes, is not enough. The jobs are
    simulated alone and sharing; what they are is unknown, so figures come as a range of several draws.
    """
    if html:
        check_page(html, force)
    if trace:
        period, past = trace.name, _of_trace(trace)
    else:
        start, end = console.check_period(starttime, endtime)
        period = f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
        past = _of_accounting(connect(), start, end, partitions, clusters)
        if os.geteuid() != 0 and {job.user for job in past} == {getpass.getuser()}:
            console.warn("only your own jobs are in it: either nobody else has any, or this site hides them from you")
    found = _simulate(past, gpus, draws, opt_in_pct, most_jobs, mechanism)
    document = _document(found, period, draws, opt_in_pct) | {"mechanism": mechanism}
    if html:
        write_page(html, render_assessment(document))
    if as_json:
        console.echo_json(document)
    else:
        click.echo(_text(document))


def _of_accounting(slurm: Slurm, start: datetime, end: datetime, partitions: str, clusters: str) -> list[PastJob]:
    pieces = []
    while start < end:
        pieces.append((start, min(start + PIECE, end)))
        start += PIECE
    past: dict[tuple[str, int, int], PastJob] = {}
    with console.progress("Reading accounting", len(pieces)) as bar:
        for since, until in pieces:
            for job in _answers(slurm, AccountingQuery(partitions=partitions, slurm_clusters=clusters), since, until):
                if job.start_s and job.end_s and job.elapsed_s > 0 and cards_of(job):
                    past[job.slurm_cluster, job.raw_id, job.submit_s] = past_job(job)
            bar.update(1)
    if not past:
        console.check_accounting_names(slurm, "cluster", clusters)
        console.check_partitions(slurm, partitions)
        raise BadInput(
            "no job that ended in this period used a GPU" + (f" of partition {partitions}" if partitions else ""),
            "Choose another period; AccountingStorageTRES of slurm.conf must have gres/gpu.",
        )
    return list(past.values())


def _answers(slurm: Slurm, query: AccountingQuery, since: datetime, until: datetime) -> Iterator[AccountedJob]:
    """The jobs of this time, in several answers where one would take too long."""
    try:
        answer = slurm.accounting(replace(query, start=since.strftime(SECONDS), end=until.strftime(SECONDS)))
    except ControllerDown:  # of sacct: no answer in time
        if until - since < 2 * LEAST_PIECE:
            raise
        middle = since + (until - since) / 2
        yield from _answers(slurm, query, since, middle)
        yield from _answers(slurm, query, middle, until)
    else:
        yield from answer


def _of_trace(path: Path) -> list[PastJob]:
    from slurm_gpushare.whatif.traces import read_jobs

    try:
        jobs = read_jobs(path)
    except RecursionError as why:
        raise BadInput(f"{path}: not a trace: nested too deeply") from why
    for job in jobs:
        if job.gpus > MOST_GPUS or job.duration_s > MOST_S:
            raise BadInput(f"{path}: a job of {job.gpus:g} GPUs for {job.duration_s:g} s cannot be")
    return [
        PastJob(path.stem, job.submit_s, job.duration_s, job.gpus, job.group or str(i % 200), None, job.fraction)
        for i, job in enumerate(jobs)
    ]


def _simulate(
    past: Sequence[PastJob], gpus: int | None, draws: int, opt_in_pct: float, most_jobs: int, mechanism: str
) -> list[Assessment]:
    by_partition: dict[str, list[PastJob]] = defaultdict(list)
    for job in past:
        by_partition[job.partition].append(job)
    steps = sum(min(len(jobs), most_jobs) for jobs in by_partition.values()) * (draws + 1)
    with console.progress("Simulating", steps) as bar:
        return [
            assess_partition(name, jobs, gpus, draws, opt_in_pct, most_jobs, bar.update, mechanism)
            for name, jobs in sorted(by_partition.items())
        ]


def _document(found: Sequence[Assessment], period: str, draws: int, opt_in_pct: float) -> dict[str, Any]:
    gpu_hours = sum(item.gpu_hours for item in found)
    saved = _sum([item.saved_gpu_h for item in found])
    return {
        "format": "gpushare-assess",
        "version": 1,
        "period": period,
        "draws": draws,
        "opt_in_pct": opt_in_pct,
        "knowledge": "26 workloads measured in pairs on a V100, dealt to users at random",
        "method": METHOD.format(draws=draws),
        "partitions": [asdict(item) for item in found],
        "total": {
            "gpu_hours": gpu_hours,
            "saved_gpu_h": asdict(saved),
            "saved_pct": asdict(Band(*(100.0 * value / gpu_hours for value in (saved.low, saved.middle, saved.high)))),
            "waits_avoided_h": asdict(_sum([item.waits_avoided_h for item in found])),
        },
    }


def _sum(bands: Sequence[Band]) -> Band:
    """Of draws that know nothing of each other: the ends are further apart than they need be."""
    return Band(*(sum(getattr(band, end) for band in bands) for end in ("low", "middle", "high")))


def _text(document: dict[str, Any]) -> str:
    numbers = ("JOBS", "GPUS", "GPU_H", "SAVED%", "SAVED_H", "WAIT", "SHARING", "ISD%")
    columns = ["PARTITION", *(f"{name}>" for name in numbers)]
    rows = [
        (
            item["partition"][:12], item["jobs"], item["gpus"],
            format(item["gpu_hours"], ".0f" if item["gpu_hours"] >= 10 else ".1f"), _short(span(item["saved_pct"])),
            _short(span(item["saved_gpu_h"], ".1f" if item["gpu_hours"] < 10 else ".0f")),
            duration_text(item["plain_wait_s"]), duration_text(item["wait_s"]["middle"]), _short(isd(item)),
        )
        for item in document["partitions"]
    ]  # fmt: skip
    total = document["total"]
    lines = [
        f"What GPU sharing would do: {document['period']}, {document['draws']} draws\n",
        console.table(columns, rows),
        "",
        f"GPU time saved  {hours_span(total['saved_gpu_h'])} of {hours(total['gpu_hours'])},"
        f" {span(total['saved_pct'], '.0f', ' %')}",
        f"waits avoided   {hours_span(total['waits_avoided_h'])}, all jobs together",
    ]
    for item in document["partitions"]:
        name, plain, really_s = item["partition"], duration_text(item["plain_wait_s"]), item["observed_wait_s"]
        seen = "" if really_s is None else f" (they really waited {duration_text(really_s)})"
        with_it = durations(item["wait_s"])
        lines.append(f"{name}: mean wait {plain} in the simulator without sharing{seen}, {with_it} with it")
        lines += remarks(item)
        if why := why_nobody_shares(item):
            lines.append(f"{name}: {why}")
        if item["jobs"] < item["all_jobs"]:
            lines.append(f"{name}: the last {item['jobs']} of {item['all_jobs']} jobs were simulated")
    head, rest = lines[:2], lines[2:]
    return "\n".join([*head, *(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in rest)])


def _short(range_text: str) -> str:
    return range_text.replace(" to ", "-").removesuffix(" %")
