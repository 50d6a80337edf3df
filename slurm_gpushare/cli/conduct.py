"""``gpushare db strikes`` and ``db audit``, for administrators: who was not what was measured, and who was slowed."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from slurm_gpushare.cli.access import settings
from slurm_gpushare.cli.checks import existing_uid
from slurm_gpushare.cli.options import JSON
from slurm_gpushare.cli.output import Column, echo_json, right, table
from slurm_gpushare.users import user_name

_DAYS = click.option("--days", default=30, show_default=True, help="How far to look back.")


@click.command("strikes")
@click.option("-u", "--user", help="Every strike of this user (name or uid) instead of a count by user.")
@_DAYS
@JSON
def strikes(user: str | None, days: int, as_json: bool) -> None:
    """List users whose jobs were past their profile.

    A strike is a running job that used more than was measured of its token, in two interim records running. Its token
    is measured anew on a whole card before it shares again. A strike may be a lie or a new version of a program.
    """
    from slurm_gpushare.store import Store

    since_s = time.time() - days * 86_400
    with Store(settings().store_url, read_only=True) as store:
        counts = store.conduct.strikes_by_uid(since_s)
        found = [] if user is None else [s for s in store.conduct.strikes_of(existing_uid(user)) if s.at_s >= since_s]
    if as_json:
        echo_json([{**asdict(item), "user": user_name(item.uid)} for item in (counts if user is None else found)])
    elif user is None:
        columns = (Column("USER"), right("STRIKES"), right("TOKENS"), Column("LAST"))
        click.echo(table(columns, [(user_name(c.uid), c.strikes, c.tokens, _when(c.last_s)) for c in counts]))
    else:
        heads = (Column("TIME"), Column("JOB"), Column("BESIDE"), Column("TOKEN"), Column("FEATURE"),
                 right("SEEN", ".0f"), right("PROFILE", ".0f"))  # fmt: skip
        rows = [(_when(s.at_s), s.job_id, s.partner_job, s.token, s.feature, s.seen, s.profiled) for s in found]
        click.echo(table(heads, rows))


@click.command("audit")
@_DAYS
@JSON
def audit(days: int, as_json: bool) -> None:
    """List jobs that were slowed past their promise, and by whose job."""
    from slurm_gpushare.store import Store

    with Store(settings().store_url, read_only=True) as store:
        found = store.conduct.broken_promises(time.time() - days * 86_400)
    if as_json:
        echo_json([{**asdict(b), "user": user_name(b.uid), "by_user": user_name(b.by_uid)} for b in found])
        return
    heads = (Column("TIME"), Column("JOB"), Column("USER"), Column("BESIDE"), Column("ITS USER"), Column("CARD"),
             right("PROMISED", ".0f"), right("SLOWED", ".0f"))  # fmt: skip
    rows = [
        (_when(b.at_s), b.job_id, user_name(b.uid), b.by_job, user_name(b.by_uid), f"{b.node}:{b.gpu_index}",
         b.promised_pct, b.slowed_pct)
        for b in found
    ]  # fmt: skip
    click.echo(table(heads, rows))


def _when(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))
