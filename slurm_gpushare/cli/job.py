"""``gpushare job ID...``: what did it use, why was it placed so, why does it wait, what did sharing cost it?"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from slurm_gpushare.cli.console import JSON, echo_json, settings_or_defaults, source, use_colour, warn
from slurm_gpushare.helper.changes import only_measured, withdrawals
from slurm_gpushare.helper.explain import tell
from slurm_gpushare.protocol.errors import BadInput, SlurmError
from slurm_gpushare.protocol.history import Span
from slurm_gpushare.protocol.text import natural
from slurm_gpushare.report.export import job_json
from slurm_gpushare.report.job_text import job_lines
from slurm_gpushare.report.job_view import History, JobView, from_accounting, from_queue, with_history
from slurm_gpushare.slurm.accounting import AccountingQuery
from slurm_gpushare.slurm.commands import Slurm, connect
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import array_of, check_job_ids


@click.command("job")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@JSON
def job(job_ids: Sequence[str], as_json: bool) -> None:
    """Explain jobs: what they use, their place, why they wait, what sharing costs.

    GPU, memory, CPU and power are for a job's owner and for those who may read the store; an array's id stands for all
    of its tasks.
    """
    wanted = check_job_ids(job_ids)
    config, slurm = settings_or_defaults(), connect()
    figures, now_s = source(config), time.time()
    found = list(_find(slurm, wanted, now_s))
    cpu_s, keys = _cpu_used_s(slurm, found), {bare.raw_id: bare.key for bare in found}
    documents = []
    for number, bare in enumerate(found):
        figures.note = ""
        history = _as_slurm_says(slurm, figures.of_job(bare.raw_id, bare.key, bare.uid), bare.raw_id)
        view = with_history(bare, history, config.promises, cpu_s.get(bare.raw_id))
        # Why it waits now is told with its numbers; the story has what came before.
        told = [d for d in history.decisions if view.why is None or d.kind != "waits"]
        names = {**figures.keys(), **keys}
        story = tell(view.key, told, names)
        if as_json:
            documents.append(job_json(view, story, figures.note))
            continue
        if number:
            click.echo()
        bars = sys.stdout.isatty() and use_colour()
        click.echo("\n".join(job_lines(view, story, figures.note, bars, names)))
    if as_json:
        echo_json(documents)


def _find(slurm: Slurm, wanted: Sequence[str], now_s: float) -> Iterator[JobView]:
    """Each job that was asked for, from the queue or from accounting; an error for the first that is nowhere."""
    jobs = slurm.jobs(wanted)
    out = _withdrawn(slurm, jobs)
    queue = [from_queue(item, now_s) for item in jobs]
    queue = [replace(known, tag=None, opted_out=True) if known.key in out else known for known in queue]
    missing = [job_id for job_id in wanted if not any(_is(job_id, known) for known in queue)]
    past: list[JobView] = []
    if missing:
        try:
            past = [from_accounting(item, now_s) for item in slurm.accounting(AccountingQuery(jobs=missing))]
        except SlurmError as error:
            if not queue:
                raise
            warn(str(error))
    told: set[str] = set()
    for job_id in wanted:
        found = sorted((known for known in (*queue, *past) if _is(job_id, known)), key=lambda known: natural(known.key))
        if not found:
            raise BadInput(f"no job {job_id}", "Neither slurmctld nor accounting knows it, or it is not yours to see.")
        for known in found:
            if known.key not in told:
                told.add(known.key)
                yield known


def _as_slurm_says(slurm: Slurm, history: History, raw_id: int) -> History:
    """The stays of a job with neighbours that have ended or were requeued since: the helper hears of it later."""
    lasting = {span.side_of(raw_id).neighbour for span in history.spans if span.end_s is None} - {0}
    try:
        beside = {job.raw_id: job for job in slurm.jobs(map(str, lasting))} if lasting else {}
    except SlurmError:
        return history

    def until(span: Span) -> Span:
        other = beside.get(span.side_of(raw_id).neighbour)
        if other is None or span.end_s is not None:
            return span
        if other.running and (other.start_s or 0) <= span.start_s:
            return span
        ended_s = other.end_s if not other.running and not other.pending else None
        return replace(span, end_s=max(span.start_s, min(ended_s or int(time.time()), int(time.time()))))

    return replace(history, spans=[until(span) for span in history.spans])


def _withdrawn(slurm: Slurm, jobs: Sequence[Job]) -> set[str]:
    """First runs whose owners have taken the token off, which only the comment says until the helper has followed."""
    measured = only_measured(jobs)
    comments = slurm.comments([job.key for job in measured]) if measured else {}
    return {job.key for job, _ in withdrawals(measured, comments)}


def _is(job_id: str, known: JobView) -> bool:
    return job_id in (known.key, str(known.raw_id), str(array_of(known.key)))


def _cpu_used_s(slurm: Slurm, jobs: Sequence[JobView]) -> dict[int, float]:
    """CPU time by accounting, of jobs that have ended; nothing where it is not gathered."""
    ended = [str(known.raw_id) for known in jobs if known.end_s is not None]
    try:
        return slurm.cpu_used_s(ended) if ended else {}
    except SlurmError:
        return {}
