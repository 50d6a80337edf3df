"""Options that several commands have: they mean and say the same everywhere."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(path_type=Path, dir_okay=False)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
NO_HEADER = click.option("-n", "--noheader", is_flag=True, help="No header and no lines below the table.")
PARSABLE = click.option("-P", "--parsable2", is_flag=True, help="Separate columns by | without padding.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would be done; change nothing.")
YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
HTML = click.option("--html", type=FILE, help="Write a self-contained page to this file.")
FORCE = click.option("--force", is_flag=True, help="Let --html replace a file that exists.")
SLURM_CLUSTERS = click.option("-M", "--clusters", default="", metavar="NAMES", help="Jobs of these Slurm clusters.")
