"""``gpushare db``: look after the store."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from slurm_gpushare.cli import console
from slurm_gpushare.protocol.errors import BadInput, Exit
from slurm_gpushare.protocol.files import user_name
from slurm_gpushare.protocol.text import moment

_UNITS_S = {"h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}
_LEAST_KEPT_S = 7 * 86_400


@click.group("db")
def db() -> None:
    """Look after the store and its records of strikes and broken promises."""


# ``gpushare db strikes`` and ``db audit``, for administrators: who was not what was measured, and who was slowed.


_DAYS = click.option("--days", default=30, show_default=True, help="How far to look back.")


@db.command("strikes")
@click.option("-u", "--user", help="Every strike of this user (name or uid) instead of a count by user.")
@_DAYS
@console.JSON
def strikes(user: str | None, days: int, as_json: bool) -> None:
    """List users whose jobs were past their profile.

    A strike is a running job that used more than was measured of its token, in two interim records running. Its token
    is measured anew on a whole card before it shares again. A strike may be a lie or a new version of a program.
    """
    since_s = time.time() - days * 86_400
    with console.open_store(console.settings(), read_only=True) as store:
        counts = store.violations.strikes_by_uid(since_s)
        uid = None if user is None else console.existing_uid(user)
        found = [item for item in store.violations.strikes(since_s) if item.uid == uid]
    if as_json:
        console.echo_json(
            [{**asdict(item), "user": user_name(item.uid)} for item in (counts if user is None else found)]
        )
    elif user is None:
        columns = ("USER", "STRIKES>", "TOKENS>", "LAST")
        click.echo(console.table(columns, [(user_name(c.uid), c.strikes, c.tokens, _when(c.last_s)) for c in counts]))
    else:
        heads = ("TIME", "JOB", "BESIDE", "TOKEN", "FEATURE",
                 "SEEN>.0f", "PROFILE>.0f")  # fmt: skip
        rows = [(_when(s.at_s), s.job_id, s.partner_job, s.token, s.feature, s.seen, s.profiled) for s in found]
        click.echo(console.table(heads, rows))


@db.command("audit")
@_DAYS
@console.JSON
def audit(days: int, as_json: bool) -> None:
    """List jobs that were slowed past their promise, and by whose job."""
    with console.open_store(console.settings(), read_only=True) as store:
        found = store.violations.broken_promises(time.time() - days * 86_400)
    if as_json:
        console.echo_json([{**asdict(b), "user": user_name(b.uid), "by_user": user_name(b.by_uid)} for b in found])
        return
    heads = ("TIME", "JOB", "USER", "BESIDE", "ITS USER", "CARD",
             "PROMISED>.0f", "SLOWED>.0f")  # fmt: skip
    rows = [
        (_when(b.at_s), b.job_id, user_name(b.uid), b.by_job, user_name(b.by_uid), f"{b.node}:{b.gpu_index}",
         b.promised_pct, b.slowed_pct)
        for b in found
    ]  # fmt: skip
    click.echo(console.table(heads, rows))


def _when(at_s: int) -> str:
    return moment(at_s, "%Y-%m-%dT%H:%M:%S")


@db.command("check")
@console.JSON
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Check that the store is sound, and say how much is in it. Exit code 3 if it is not."""
    from slurm_gpushare.store.database import Database
    from slurm_gpushare.store.maintenance import problems, sizes

    config = console.settings()
    database = Database(config.store_url, must_exist=True)
    found = problems(database)
    rows = {}
    if not found:
        with console.open_store(config) as store:
            rows = sizes(store)
    if as_json:
        console.echo_json({"store": database.where, "problems": found, "rows": rows})
    elif found:
        for line in found:
            click.echo(f"{database.where}: {line}")
    else:
        click.echo(console.table(("TABLE", "ROWS>"), list(rows.items())))
        click.echo(f"{database.where}: sound")
    if found:
        ctx.exit(Exit.PROBLEMS)


@db.command("ingest")
@console.JSON
def ingest(as_json: bool) -> None:
    """Take waiting telemetry records into the store.

    The helper does this by itself every tick. Records that cannot be used are moved to rejected/ in the spool
    directory, with the reason beside them; records of jobs that Slurm does not know yet wait.
    """
    from slurm_gpushare.helper.housekeeping import job_tokens, make_ingest
    from slurm_gpushare.slurm.commands import connect

    config = console.settings()
    with console.open_store(config) as store:
        summary = make_ingest(config, store, job_tokens(connect(), store)).run_all()
    counts = {name: summary.counts[name] for name in _WORDS}
    if as_json:
        console.echo_json({**counts, "waiting": summary.waiting, "restarts": summary.restarts})
        return
    told = [f"{count} {_WORDS[name]}" for name, count in counts.items() if count]
    told += [f"{summary.waiting} jobs that Slurm does not know yet"] if summary.waiting else []
    click.echo("gpushare: ingest: " + (", ".join(told) or "nothing new"))
    for line in summary.restarts:
        console.warn(line)


_WORDS = {
    "final": "runs",
    "interim": "interim records",
    "duplicate": "seen before",
    "rejected": "rejected",
    "excess": "removed unread (too many of one user)",
    "stray": "strays removed",
    "stuck": "that cannot be removed",
    "ignored": "ignored",
    "counted": "counted in profiles",
    "kept": "kept beside profiles",
    "untokened": "of jobs without a token",
    "foreign": "for somebody else's token",
    "outranked": "outranked by a node's",
}


@db.command("migrate")
def migrate_command() -> None:
    """Make the store, or bring it to this release's schema."""
    from slurm_gpushare.store.database import Database
    from slurm_gpushare.store.schema import known_migrations, migrate

    database = Database(console.settings().store_url)
    applied = migrate(database)
    for migration in applied:
        click.echo(f"{database.where}: applied {migration.version:04d}_{migration.name}")
    if not applied:
        click.echo(f"{database.where}: up to date (schema {known_migrations()[-1].version})")


@db.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
def backup_command(file: Path) -> None:
    """Copy the store to FILE while it is in use."""
    from slurm_gpushare.store.database import Database
    from slurm_gpushare.store.maintenance import backup

    database = Database(console.settings().store_url, must_exist=True)
    backup(database, file)
    click.echo(f"{database.where}: copied to {file}")


@db.command("restore")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@console.YES
def restore_command(file: Path, yes: bool) -> None:
    """Make FILE, which 'db backup' wrote, the store again. The helper must be stopped.

    What was there is kept beside it. An older release's copy is brought to this release's schema.
    """
    from slurm_gpushare.helper.lease import Lock
    from slurm_gpushare.store.maintenance import restore, store_path

    config = console.settings()
    path = store_path(config.store_url)
    with Lock(config.state_dir, "Stop it first: systemctl stop gpushare-backfill."):
        if path.exists() and not yes:
            click.confirm(f"{path}: put {file} in its place?", abort=True)
        kept = restore(config.store_url, file)
    click.echo(f"{path}: restored from {file}" + (f"; what was there is {kept}" if kept else ""))


@db.command("prune")
@click.option("--older-than", "age", metavar="AGE", help="Age such as 90d, 26w or 2y.")
@click.option("--compact", is_flag=True, help="Give back the room that is free in it. The helper must be stopped.")
@console.DRY_RUN
@console.YES
def prune_command(age: str | None, compact: bool, dry_run: bool, yes: bool) -> None:
    """Forget runs, decisions and observations older than AGE, and tokens not used since.

    What profiles of tokens still in use rest on is kept, and so is the last week.
    """
    from slurm_gpushare.helper.lease import Lock
    from slurm_gpushare.store import maintenance

    kept_s = None if age is None else _seconds(age)
    if kept_s is None and not compact:
        raise BadInput("prune: there is nothing to do", "Say --older-than AGE, or --compact.")
    if kept_s is not None and kept_s < _LEAST_KEPT_S:
        raise BadInput(f"--older-than {age}: the last week is always kept", "Give 7d or more.")
    config = console.settings()
    with console.open_store(config) as store:
        where = store.database.where
        if kept_s is not None:
            before_s = maintenance.present_s(store.database, time.time()) - kept_s
            planned = _told(maintenance.prune(store, before_s, dry_run=True))
            if dry_run:
                click.echo(f"{where}: would remove {planned or 'nothing'}")
            elif planned and not yes:
                click.confirm(f"{where}: forget {planned}?", abort=True)
            if not dry_run:
                click.echo(f"{where}: removed {_told(maintenance.prune(store, before_s)) or 'nothing'}")
        if compact and not dry_run:
            with Lock(config.state_dir, "Stop it first: systemctl stop gpushare-backfill."):
                maintenance.compact(store.database)
            click.echo(f"{where}: compacted")


@db.command("forget")
@click.option("-u", "--user", required=True, help="Name or uid of somebody who has left.")
@console.DRY_RUN
@console.YES
def forget_command(user: str, dry_run: bool, yes: bool) -> None:
    """Forget a user: tokens, what was measured of them, jobs and decisions.

    What others' jobs shared with theirs stays, without a token. A token that is used again is somebody's first.
    """
    from slurm_gpushare.store.maintenance import forget_user
    from slurm_gpushare.store.published import OWNERS

    config, uid = console.settings(), int(user) if user.isdecimal() else console.existing_uid(user)
    with console.open_store(config) as store:
        where, planned = store.database.where, _told(forget_user(store, uid, dry_run=True))
        if dry_run or not planned:
            click.echo(f"{where}: {'would remove' if planned else 'holds'} {planned or 'nothing of this user'}")
            return
        if not yes:
            click.confirm(f"{where}: forget {planned} of {user_name(uid)}?", abort=True)
        forget_user(store, uid)
    (config.public_dir / OWNERS / str(uid)).unlink(missing_ok=True)
    click.echo(f"{where}: removed {planned}")


def _told(removed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(removed.items()) if count)


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([hdwy])", age)
    if match is None:
        raise BadInput(f"--older-than {age}: not an age", "Write a number and h, d, w or y: 90d.")
    return int(match[1]) * _UNITS_S[match[2]]
