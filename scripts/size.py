"""How big the house is, by what a newcomer has to hold: lines, modules, names, settings, commands, tables.

.venv/bin/python scripts/size.py [--json]

Generated files, migrations and reference pages are not counted, nor are stand-ins of other people's programs (the
emulated NVML in C). ``scripts/way.py`` counts the files that one job passes.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import click
from gpushare_lab.cli.main import gpushare_lab

from slurm_gpushare.cli.main import gpushare
from slurm_gpushare.protocol.settings import KEYS, Place
from slurm_gpushare.protocol.tag import Tag
from slurm_gpushare.store.schema import METADATA

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = {"attributes.md", "commands.md", "lab-commands.md", "configuration.md"}
SHAPES_OF_A_JOB = {
    "protocol.tag": ("Consent", "Tag"),
    "protocol.record": ("Record",),
    "protocol.history": ("StoredJob", "Span"),
    "slurm.queue": ("Job",),
    "slurm.accounting": ("AccountedJob",),
    "store.stored_jobs": ("StoredRun",),
    "store.published": ("PublicJob",),
    "helper.snapshot": ("PendingJob", "Occupant", "Placement"),
    "node.figures": ("RunFigures",),
    "report.job_view": ("JobView",),
}
"""The types, by module, for what one job is between sbatch and report."""
GENERATED = "make_reference.py"
"""What every generated file names in its first lines."""


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def lines(paths: Iterable[Path]) -> int:
    """Without what a program writes into a file between two marks."""
    texts = (re.sub(rb"(?ms)^# >>> made$.*^# <<< made$\n", b"", path.read_bytes()) for path in paths)
    return sum(text.count(b"\n") for text in texts)


def by_hand(paths: Iterable[Path]) -> list[Path]:
    """Those that no program writes."""
    return [path for path in paths if GENERATED not in "".join(path.read_text().splitlines(keepends=True)[:3])]


def import_lines(path: Path) -> int:
    imports = (ast.Import, ast.ImportFrom)
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, imports))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def long_signatures(paths: Iterable[Path]) -> int:
    """Functions with seven parameters or more, commands aside, whose options click names."""
    return sum(
        len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - _has_self(node) > 6
        for path in paths
        if path.parent.name != "cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for arguments in [node.args]
    )


def _has_self(node: ast.FunctionDef) -> bool:
    return bool(node.args.args) and node.args.args[0].arg in {"self", "cls"}


def commands(group: click.Group) -> list[click.Command]:
    """All commands below a group that a person may call, without hidden ones."""
    context = click.Context(group)
    members = [group.get_command(context, name) for name in group.list_commands(context)]
    found: list[click.Command] = []
    for member in members:
        if member is not None and not member.hidden:
            found += commands(member) if isinstance(member, click.Group) else [member]
    return found


def options(group: click.Group) -> int:
    return sum(isinstance(param, click.Option) for command in commands(group) for param in command.params)


def shapes() -> list[type]:
    """Those of `SHAPES_OF_A_JOB`; AttributeError where one is not there any more."""
    rooms = ((import_module(f"slurm_gpushare.{room}"), names) for room, names in SHAPES_OF_A_JOB.items())
    return [getattr(room, name) for room, names in rooms for name in names]


def figures() -> dict[str, int | list[str]]:
    product = tracked("slurm_gpushare/*.py")
    modules = [path for path in product if path.name != "__init__.py"]
    names = Counter(path.name for path in modules if path.parent.name != "cli" and path.name != "__main__.py")
    sizes = [lines([path]) for path in modules]
    scripts = by_hand([*tracked("lua_bridge/*.lua"), *(path for path in tracked("prolog/*") if path.suffix != ".py")])
    docs = [path for path in tracked("docs/*.md") if path.name not in REFERENCE]
    return {
        "product, lines of Python": lines(by_hand(product)),
        "product, modules": len(modules),
        "product, modules of at most 60 lines": sum(size <= 60 for size in sizes),
        "product, longest module": max(sizes),
        "product, lines of imports": sum(map(import_lines, modules)),
        "product, functions of seven parameters or more": long_signatures(modules),
        "product, names used twice": sorted(name for name, times in names.items() if times > 1),
        "product, templates": lines(tracked("slurm_gpushare/*.j2")),
        "lab, lines of Python": lines(by_hand(tracked("lab/*.py"))),
        "Lua and shell by hand, lines": lines(scripts),
        "docs by hand, lines": lines(by_hand(docs)),
        "tests, lines": lines(tracked("tests/*.py", "tests/*.lua")),
        "settings that a site sets": sum(key.place is Place.SITE for key in KEYS),
        "types for what a job is on its way": len(shapes()),
        "fields of the tag": len(Tag.__dataclass_fields__),
        "tables of the store": len(METADATA.tables),
        "commands of gpushare": len(commands(gpushare)),
        "options of gpushare": options(gpushare),
        "commands of gpushare-lab": len(commands(gpushare_lab)),
        "files that know of gangs": sum(
            bool(re.search(r"gang", path.read_text(), re.IGNORECASE)) for path in [*product, *scripts]
        ),
    }


def main() -> None:
    found = figures()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        print(f"{name:48} {', '.join(value) or 'none' if isinstance(value, list) else value:>8}")


if __name__ == "__main__":
    main()
