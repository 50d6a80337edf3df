"""``gpushare backfill`` and ``gpushare release``: the helper, and undoing it."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_gpushare.cli.console import DRY_RUN, warn
from slurm_gpushare.protocol.errors import Exit, GpushareError
from slurm_gpushare.protocol.settings import POLICIES
from slurm_gpushare.protocol.settings_in_force import settings_and_fault, settings_in_force
from slurm_gpushare.slurm.values import check_job_ids

if TYPE_CHECKING:
    from slurm_gpushare.slurm.commands import Slurm


@click.command("backfill")
@click.option("--once", is_flag=True, help="One look at the queue, then exit.")
@DRY_RUN
@click.option("--policy", type=click.Choice(POLICIES), help="Who shares with whom, instead of gpushare.conf's Policy.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def backfill(once: bool, dry_run: bool, policy: str | None, verbose: bool) -> None:
    """Run the backfill helper: place complementary jobs on the same card.

    Runs as SlurmUser on the machine of slurmctld until it is told to stop: SIGTERM finishes the tick, SIGHUP
    reads gpushare.conf again, SIGUSR1 looks at once. If it dies, jobs go on as they were submitted.
    """
    from slurm_gpushare.helper.process import backfill as run
    from slurm_gpushare.slurm.commands import connect

    journal = "INVOCATION_ID" in os.environ  # which adds its own times
    layout = "%(message)s" if journal else "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(stream=sys.stderr, format=layout, level=logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
    config, fault = settings_and_fault()  # remembered once all that is made from them has been made
    if fault is not None:
        warn(f"{fault.what}; the last good settings stay in force")
    if not config.partitions:
        raise GpushareError(f"{config.source}: Partitions is empty", "Name the partitions whose jobs may share GPUs.")
    report = run(config, connect(config.backend, lasting=True), once=once, dry_run=dry_run, policy=policy)
    if report is not None:
        done = ", ".join(f"{count} {what}" for what, count in sorted(report.outcomes.items())) or "nothing to do"
        click.echo(f"{report.jobs} jobs, {report.pending} waiting for a GPU, {report.pairs} pairs: {done}")


_NOT_THE_REQUEST = frozenset({"AdminComment", "Account"})
"""The tag, and the job's own account, which changes nothing: it makes Slurm refuse where the job has started."""


@click.command("release")
@click.option("-j", "--jobs", metavar="ID[,ID...]", help="Only these jobs.")
@DRY_RUN
@click.option("--if-stale", is_flag=True, help="Do nothing while the helper is alive: for the watchdog's timer.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def release(jobs: str | None, dry_run: bool, if_stale: bool, quiet: bool) -> None:
    """Give pending jobs that we touched their original requests back.

    Leases of ours end as well, and jobs that we paused go on. Needs nothing but Slurm: all that must be known is in the
    jobs' tags. A job that somebody else suspended stays suspended.
    """
    from slurm_gpushare.helper.changes import Outcome, release_jobs
    from slurm_gpushare.helper.promises import release_paused
    from slurm_gpushare.slurm.commands import connect

    say: Callable[[str], None] = (lambda _: None) if quiet else click.echo
    if if_stale and (age_s := _heartbeat_age_s()) is not None:
        say(f"the helper is alive: its last sign was {age_s:.0f} s ago")
        return
    wanted = check_job_ids([jobs] if jobs else [])
    slurm = connect(patient=True)
    if not wanted and (host := _in_charge_elsewhere(slurm)):
        say(f"the helper on {host} is in charge of all jobs: stop it there, or name some with --jobs")
        return
    found, now_s = slurm.jobs(wanted), time.time()
    resumed = {Outcome.DONE: "goes on", Outcome.DRY: "would go on"}
    told = [(resumed, "after its pause", applied) for applied in release_paused(slurm, found, _spool_dir(), dry_run)]
    released = {Outcome.DONE: "released", Outcome.DRY: "would be released"}
    for change, applied in release_jobs(slurm, found, now_s, dry_run):
        fields = (f"{name}={value}" for name, value in change.fields.items() if name not in _NOT_THE_REQUEST)
        told.append((released, " ".join(fields), applied))
    for said, what, applied in told:
        say(f"{applied.key}: {said.get(applied.outcome, str(applied.outcome))} {what}".rstrip())
        if applied.outcome is Outcome.REFUSED:
            warn(f"{applied.key}: {applied.message}")
    if not told:
        say("no pending job to release, and none that is paused")
    if any(applied.outcome is Outcome.REFUSED for *_, applied in told):
        sys.exit(Exit.FAILURE)


def _in_charge_elsewhere(slurm: Slurm) -> str:
    """The other host whose helper is at work; empty if there is none, or nobody can say."""
    from slurm_gpushare.helper.lease import in_charge

    try:
        held = in_charge(settings_in_force(), slurm)
    except (OSError, GpushareError):
        return ""
    return held.host if held is not None and held.host != socket.gethostname() else ""


def _spool_dir() -> Path | None:
    """Where nodes are told; None without settings: their orders lapse by themselves."""
    try:
        return settings_in_force().spool_dir
    except GpushareError:
        return None


def _heartbeat_age_s() -> float | None:
    """How long ago the helper was alive; None if that is too long, or unknown."""
    from slurm_gpushare.store.hookfile import HookFile

    config = settings_in_force()
    beat_s = HookFile(config.hook_file).heartbeat_s()
    age_s = None if beat_s is None else time.time() - beat_s
    return age_s if age_s is not None and age_s <= config.heartbeat_s else None
