"""``gpushare configure``: the lines to add to a site's files, or the files themselves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from slurm_gpushare.cli.console import JSON, echo_json, styled, warn
from slurm_gpushare.protocol.errors import BadInput, ConfigError, SlurmError
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.site.configure import SUBMIT_BESIDE, choose, pieces
from slurm_gpushare.site.current_setup import GENERATED, collect
from slurm_gpushare.site.site_files import FileKind, Piece, undo, write, writes
from slurm_gpushare.site.units import unit_pieces, unit_site
from slurm_gpushare.slurm.commands import connect

_LONGEST_DIFF = 40
SCRIPT_KEYS = ("Prolog", "Epilog", "TaskProlog", "EpilogSlurmctld")
_HEADINGS = {
    FileKind.MERGE: "add to {name}",
    FileKind.FILE: "{name}, a file of its own",
    FileKind.RUN: "run these commands",
}


@click.command()
@click.option("-p", "--partition", "partitions", default="", metavar="NAMES",
              help="Partitions whose jobs may share GPUs.")  # fmt: skip
@click.option("--gpu-model", "gpu_models", default="", metavar="NAMES",
              help="The models whose GPUs may be shared, by their types; needed where nodes have several.")  # fmt: skip
@click.option("--shards", "shards_per_gpu", type=click.IntRange(2, 64),
              help="Shards a GPU; by default as it is, else 2.")  # fmt: skip
@click.option("--write", "target", type=click.Path(file_okay=False, path_type=Path),
              help="Write the files under this directory.")  # fmt: skip
@click.option("--undo", "undone", type=click.Path(file_okay=False, exists=True, path_type=Path),
              help="Put back every file that --write changed under this directory.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="With --write: do not ask before changing files.")
@JSON
def configure(
    partitions: str, gpu_models: str, shards_per_gpu: int | None, target: Path | None, undone: Path | None, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Print what to add to the site's files, each line with its reason.

    Reads the site from Slurm and changes nothing in it. With --write the files of our own are written under a
    directory, and lines for files that the site keeps itself beside them as NAME.gpushare; a diff comes first.
    gpushare.conf keeps what the site has set: only keys that are worked out here change, in place. What Slurm says of
    itself goes into a file beside it that nobody edits: after an upgrade of Slurm run this again, until then no job is
    converted. --undo puts every file back as it was before the first --write.
    """
    if undone is not None:
        if target is not None:
            raise BadInput("configure: --write and --undo together", "Choose one of them.")
        _warn_if_in_use(undone)
        for line in undo(undone):
            click.echo(line)
        return
    names, models = ([name for name in text.split(",") if name] for text in (partitions, gpu_models))
    facts = collect(connect())
    choice = choose(facts, names, models, shards_per_gpu)
    found = pieces(facts, choice)
    _warn_of_mistakes(found)
    settings = "".join(piece.text for piece in found if piece.name in ("gpushare.conf", GENERATED))
    found += unit_pieces(unit_site(facts, Path(sys.argv[0]).resolve(), settings, shutil.which("scontrol")))
    if as_json:
        echo_json([{"name": p.name, "kind": p.kind.value, "text": p.text} for p in found])
    elif target is None:
        for piece in found:
            click.echo(styled(f"### {_HEADINGS[piece.kind].format(name=piece.name)}", "cyan"))
            click.echo(f"# made from {piece.source}; --write writes it\n" if piece.source else piece.text)
    if target is not None:
        _write(found, target, yes)


def _warn_of_mistakes(found: Iterable[Piece]) -> None:
    """What the site has written itself stays as it is, so a mistake in it does too."""
    for piece in found:
        if piece.name == "gpushare.conf":
            try:
                for line in parse_config(piece.text).warnings:
                    warn(f"{line}.")
            except ConfigError as error:
                warn(f"{error.what}. It stays as you wrote it; the last good settings are in force until it is mended.")


def _warn_if_in_use(directory: Path) -> None:
    """Without its scripts slurmctld does not start again, nodes drain and sbatch fails."""
    try:
        config = connect().config()
    except SlurmError:
        return
    if used := [key for key in SCRIPT_KEYS if f"{directory.absolute()}/" in config.get(key, "")]:
        warn(
            f"Slurm still runs {', '.join(used)} from {directory}: jobs fail and nodes drain from now on. "
            "Put your own lines back and restart slurmctld and the slurmds before --undo."
        )


def _write(found: list[Piece], target: Path, yes: bool) -> None:
    changes = writes(found, target)
    if not changes:
        click.echo(f"{target}: nothing to change")
        return
    for change in changes:
        click.echo(_shortened(change.diff()) if change.before is not None else f"new: {target / change.name}")
    if any(change.before is not None for change in changes) and not yes:
        click.confirm("Change these files?", abort=True)
    write(changes, target)
    merge = [change.name for change in changes if change.name.endswith(".gpushare")]
    by_hand = f" Work {', '.join(merge)} into your own files, then run 'gpushare doctor'." if merge else ""
    click.echo(f"{target}: {len(changes)} files written; --undo {target} puts them back.{by_hand}")
    if any(change.name == SUBMIT_BESIDE and change.before is not None for change in changes):
        own = target / "job_submit.lua"
        click.echo(f"slurmctld goes on with the old {SUBMIT_BESIDE} until your own script changes: touch {own}")


def _shortened(diff: str) -> str:
    """A diff that a person reads; of a whole release's changes to a script its beginning."""
    lines = diff.splitlines()
    if len(lines) <= _LONGEST_DIFF:
        return diff
    return "\n".join([*lines[:_LONGEST_DIFF], f"... and {len(lines) - _LONGEST_DIFF} more lines\n"])
