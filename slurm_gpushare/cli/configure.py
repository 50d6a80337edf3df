"""``gpushare configure``: the lines to add to a site's files, or the files themselves."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click

from slurm_gpushare.cli.output import echo_json, styled
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.resources import resource_dir
from slurm_gpushare.site.configure import Install, Kind, Piece, choose, pieces
from slurm_gpushare.site.facts import collect
from slurm_gpushare.site.units import unit_pieces
from slurm_gpushare.slurm.interface import connect

_HEADINGS = {
    Kind.MERGE: "add to {name}",
    Kind.FILE: "{name}, a file of its own",
    Kind.RUN: "run these commands",
}


@click.command()
@click.option(
    "-p", "--partition", "partitions", default="", metavar="NAMES", help="Partitions whose jobs may share GPUs."
)
@click.option("--gpu-model", metavar="NAME", help="The GPUs' name in features and types; by default their type now.")
@click.option(
    "--shards", "shards_per_gpu", type=click.IntRange(2, 64), default=2, show_default=True, help="Shards a GPU."
)
@click.option(
    "--write", "target", type=click.Path(file_okay=False, path_type=Path), help="Write the files under this directory."
)
@click.option("-y", "--yes", is_flag=True, help="With --write: do not ask before replacing files.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def configure(
    partitions: str, gpu_model: str | None, shards_per_gpu: int, target: Path | None, yes: bool, as_json: bool
) -> None:
    """Print what to add to the site's files, each line with its reason.

    Reads the site from Slurm and changes nothing in it. With --write the files of our own are written under a
    directory, and lines for files that the site keeps itself beside them as NAME.gpushare; a diff comes first.
    """
    names = [name for name in partitions.split(",") if name]
    facts = collect(connect())
    choice = choose(facts, names, gpu_model, shards_per_gpu)
    install = Install(Path(sys.executable), resource_dir("lua_bridge"), resource_dir("prolog"))
    found = [*pieces(facts, choice, install), *unit_pieces(facts, Path(sys.argv[0]).resolve())]
    if as_json:
        echo_json([{"name": p.name, "kind": p.kind.value, "text": p.text} for p in found])
    elif target is None:
        for piece in found:
            click.echo(styled(f"### {_HEADINGS[piece.kind].format(name=piece.name)}", "cyan"))
            click.echo(f"# a copy of {piece.source}\n" if piece.source else piece.text)
    if target is not None:
        _write(found, target, yes)


def _write(found: list[Piece], target: Path, yes: bool) -> None:
    changed = []
    for piece in found:
        path = target / (piece.name if piece.kind is Kind.FILE else f"{piece.name}.gpushare")
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != piece.text:
            changed.append((path, piece))
            diff = difflib.unified_diff(before.splitlines(True), piece.text.splitlines(True), str(path), str(path))
            click.echo("".join(diff))
    if not changed:
        click.echo(f"{target}: nothing to change")
        return
    if any(path.exists() for path, _ in changed) and not yes:
        click.confirm("Replace these files?", abort=True)
    try:
        for path, piece in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(piece.text, encoding="utf-8")
            path.chmod(0o755 if piece.executable else 0o644)
    except OSError as why:
        raise GpushareError(f"{why.filename or target}: cannot be written: {why.strerror}") from why
    click.echo(
        f"{target}: {len(changed)} files written. Merge the .gpushare files by hand, then run 'gpushare doctor'."
    )
