"""``gpushare optout``: take pending jobs out of sharing."""

from __future__ import annotations

import sys

import click

from slurm_gpushare.cli.console import DRY_RUN, warn
from slurm_gpushare.protocol.errors import BadInput, Exit
from slurm_gpushare.slurm.values import check_job_ids


@click.command("optout")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@DRY_RUN
def optout(jobs: tuple[str, ...], dry_run: bool) -> None:
    """Take pending jobs of yours out of sharing.

    An array's id stands for all of its tasks that wait.
    Our word is taken off the job's comment; the submit hook then gives the job the whole GPU that it asked for. It
    keeps its place in the queue. A job that runs already stays where it is. Before Slurm 23.11.5, on partitions with
    DefMemPerGPU and as a gang, a submitted job cannot be changed back: cancel it and submit it without the token.
    """
    from slurm_gpushare.helper.changes import Change, Outcome, apply
    from slurm_gpushare.protocol.tag import without_consent
    from slurm_gpushare.slurm.commands import connect

    jobs = tuple(check_job_ids(jobs))
    slurm = connect(patient=True)
    pending = [job for job in slurm.jobs(jobs) if job.pending]
    found = {job.key: job for job in pending}
    known = {name for job in pending for name in (job.key, str(job.raw_id), str(job.array_id))}
    if missing := [key for key in jobs if key not in known]:
        raise BadInput(f"no pending job {missing[0]}", "A job that runs keeps its card; 'gpushare jobs' lists them.")
    failed, comments = False, slurm.comments(jobs)
    for key, job in found.items():
        comment = comments.get(key, "")
        kept = without_consent(comment)
        if kept == comment:
            click.echo(f"{key}: takes no part in sharing")
            continue
        fields = {"Comment": kept}
        if job.tag is not None and job.tag.placed and job.tag.nodes is None:
            fields["ReqNodeList"] = ""  # the helper's choice
        applied = apply(slurm, Change(key, fields), dry_run)
        failed |= applied.outcome not in (Outcome.DONE, Outcome.DRY)
        said = {Outcome.DONE: "out of sharing", Outcome.DRY: "would be taken out of sharing, for a whole GPU"}
        click.echo(f"{key}: {said.get(applied.outcome, str(applied.outcome))}")
        if applied.message:
            warn(applied.message)
    if failed:
        sys.exit(Exit.FAILURE)
