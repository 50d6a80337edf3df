"""How commands print: aligned tables, ``---`` for the unknown, colour and progress only on a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_gpushare.protocol.errors import BadInput, ConfigError, GpushareError, NotInstalled, SlurmError
from slurm_gpushare.protocol.files import is_there, uid_of
from slurm_gpushare.protocol.settings import DEFAULTS, Config
from slurm_gpushare.protocol.settings_in_force import settings_and_fault
from slurm_gpushare.report.sources import PublishedSource, Source, StoreSource
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.values import names, parse_time

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store

UNKNOWN = "---"

Cell = str | int | float | None


def text_of(value: Cell, spec: str = "") -> str:
    """A cell as people read it: the unknown is ``---``, never 0."""
    if value is None or value == "" or value != value:  # the last is NaN
        return UNKNOWN
    return value if isinstance(value, str) else format(value, spec)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, header: bool = True, delimiter: str | None = None
) -> str:
    """Rows as aligned columns, or separated by `delimiter` (squeue's and sacct's -P) without padding.

    A head is a column's name. ``ISD%>.1f`` is a column of numbers: to the right, and written so.
    """
    columns = [head.partition(">") for head in heads]
    lines = [[text_of(value, form) for (_, _, form), value in zip(columns, row, strict=True)] for row in rows]
    if header:
        lines.insert(0, [name for name, _, _ in columns])
    if delimiter is not None:
        return "\n".join(delimiter.join(line) for line in lines)
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    aligned = (
        "  ".join(
            word.rjust(width) if numbers else word.ljust(width)
            for word, width, (_, numbers, _) in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join(aligned)


Fields = Mapping[str, tuple[str, Callable[[Any], Cell]]]
"""What a list can show of each of its items, by the names that ``-o`` takes."""


@dataclass(frozen=True, slots=True)
class Listing:
    """How a list is wanted: its columns, and whether for people, for scripts or as JSON."""

    fields: Fields
    chosen: tuple[str, ...]
    header: bool
    parsable: bool
    as_json: bool

    @property
    def for_people(self) -> bool:
        return self.header and not (self.parsable or self.as_json)

    def text(self, items: Iterable[Any], **other: tuple[str, Callable[[Any], Cell]]) -> str:
        """A line an item; `other` are fields that only the caller can tell."""
        columns = [{**self.fields, **other}[name] for name in self.chosen]
        rows = [[value(item) for _, value in columns] for item in items]
        return table(
            [column for column, _ in columns], rows, header=self.header, delimiter="|" if self.parsable else None
        )


def listing(fields: Fields, default: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command that prints a list: ``-o -n -P --json``, which it is given as `listing`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(names: str | None, noheader: bool, parsable2: bool, as_json: bool, *args: Any, **options: Any) -> Any:
            chosen = tuple(name.strip().lower() for name in names.split(",")) if names else tuple(default)
            if unknown := [name for name in chosen if name not in fields]:
                raise BadInput(f"no field '{unknown[0]}'", f"There are: {', '.join(fields)}.")
            wanted = Listing(fields, chosen, not noheader, parsable2, as_json)
            return command(*args, listing=wanted, **options)

        columns = f"Columns: {','.join(fields)}."
        for option in (
            JSON,
            click.option("-P", "--parsable2", is_flag=True, help="Separate columns by | without padding."),
            click.option("-n", "--noheader", is_flag=True, help="No header and no lines below the table."),
            click.option("-o", "--format", "names", metavar="FIELDS", help=columns),
        ):
            run = option(run)
        return run

    return decorate


def wrapped(sentence: str) -> str:
    """A sentence in lines of at most 80 columns."""
    return textwrap.fill(sentence, 80, break_on_hyphens=False, break_long_words=False)


def echo_json(data: Any) -> None:
    """Print `data` for scripts: one JSON document, stable key order; what is no number is null."""
    click.echo(json.dumps(_finite(data), indent=2, sort_keys=True, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and math.isnan(data) else data


def echo_models(documents: Sequence[dict[str, Any]]) -> None:
    """Print the first GPU model's document; where there are several, all of them are in it under ``models``."""
    echo_json(documents[0] | ({"models": documents} if len(documents) > 1 else {}))


def use_colour() -> bool:
    """Colour only for a person at a terminal who has not declined it (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, colour: str) -> str:
    """`text` in `colour` where colour is in use, else as it is."""
    return click.style(text, fg=colour) if use_colour() else text


def warn(message: str) -> None:
    """One line on stderr that does not stop the command."""
    click.echo(f"gpushare: warning: {' '.join(message.split())}", err=True)


def progress(label: str, length: int) -> Any:
    """A bar on stderr, with ``update``, for work over about two seconds; silent where stderr is no terminal."""
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()
    return click.progressbar(length=length, label=label, file=shown)


# Options that several commands have: they mean and say the same everywhere.


FILE = click.Path(path_type=Path, dir_okay=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would be done; change nothing.")
YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
HTML = click.option("--html", type=FILE, help="Write a self-contained page to this file.")
FORCE = click.option("--force", is_flag=True, help="Let --html replace a file that exists.")
SLURM_CLUSTERS = click.option("-M", "--clusters", default="", metavar="NAMES", help="Jobs of these Slurm clusters.")


# Checks of options that filter: a name that does not exist is an error, with exit code 2.


def check_users(text: str) -> set[int]:
    """The uids of users that exist, given by name or number."""
    return {existing_uid(name) for name in names(text)}


def existing_uid(user: str) -> int:
    uid = uid_of(user)
    if uid is None:
        raise BadInput(f"there is no user '{user}'")
    return uid


def check_partitions(slurm: Slurm, text: str) -> frozenset[str]:
    """Partitions that exist, as far as slurmctld can be asked."""
    wanted = names(text)
    if wanted:
        try:
            known = {partition.name for partition in slurm.partitions()}
        except SlurmError:
            return wanted  # accounting answers without slurmctld
        check_names("partition", wanted, known)
    return wanted


def check_period(starttime: str, endtime: str) -> tuple[datetime, datetime]:
    """Two times as sacct takes them, the second one later."""
    now = datetime.now()
    start, end = parse_time(starttime, now), parse_time(endtime, now)
    if end <= start:
        raise BadInput(f"the period is empty: it ends ({endtime}) before it starts ({starttime})")
    return start, end


def check_accounting_names(slurm: Slurm, kind: str, text: str) -> None:
    """Accounts or Slurm clusters, as far as accounting tells this user of them."""
    if wanted := names(text):
        try:
            known = slurm.accounting_names(kind)
        except SlurmError:
            return
        if known:
            check_names(kind, wanted, known)


def check_names(kind: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """That each of them is known."""
    there = set(known)
    if unknown := sorted(set(wanted) - there):
        few = sorted(there)[:8]
        hint = f"There are: {', '.join(few)}{', ...' if len(there) > len(few) else ''}." if few else ""
        raise BadInput(f"there is no {kind} '{unknown[0]}'", hint)


# What this user may read: the settings in force, and the store or what the helper published.


def source(config: Config, *, loud: bool = False) -> Source:
    """Where this user's figures come from."""
    store = readable_store(config, loud=loud)
    if store is not None:
        return StoreSource(store, config.public_dir)
    return PublishedSource(config.public_dir, os.geteuid(), config.munge_socket)


def open_store(config: Config, *, read_only: bool = False) -> Store:
    """The store, for a command that cannot do without. Its library, which login nodes lack, is imported only here."""
    from slurm_gpushare.store.store import Store

    return Store(config.store_url, read_only=read_only)


def settings() -> Config:
    """The settings in force. While gpushare.conf has a mistake or is away: the last good ones, and a warning."""
    config, fault = settings_and_fault()
    if fault is not None:
        warn(f"{fault.what}. The last good settings stay in force until it is mended; 'gpushare doctor' checks it.")
    return config


def settings_or_defaults(*, loud: bool = True) -> Config:
    """The same for commands that only show something: where there are none, the defaults, and a warning if `loud`."""
    try:
        return settings()
    except ConfigError as error:
        if loud:
            warn(f"{error} The defaults are used.")
        return DEFAULTS


def readable_store(config: Config, *, loud: bool = True) -> Store | None:
    """The store for reading, or None: users have no access to it, and need none.

    Commands answer at once where there is nothing to open. Who was told already that the defaults are used is not told
    that nothing is there.
    """
    loud = loud and config.source is not None
    path = config.store_url.removeprefix("sqlite://")
    if path != config.store_url and not os.access(path, os.R_OK) and not (loud and not is_there(Path(path))):
        return None
    try:
        return open_store(config, read_only=True)
    except ModuleNotFoundError as missing:
        if loud:
            warn(f"{NotInstalled(missing.name or '', 'controller')} What the helper published is shown.")
        return None
    except GpushareError as error:
        if loud:
            warn(f"{error} What the helper published is shown.")
        return None
