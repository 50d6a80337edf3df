"""The layers of docs/architecture.md, read off the imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "slurm_gpushare"
LAYERS = (
    {"atomic_files", "errors", "history", "ownership", "promises", "resources", "users"},
    {"config", "csv_rows", "tokens"},
    {"last_good"},
    {"telemetry", "store", "knowledge", "slurm"},
    {"report", "coschedule", "simulate", "site"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAY_ALSO_IMPORT = {
    ("store", "telemetry"),  # records come in as telemetry's dataclasses
    ("simulate", "coschedule"),  # the simulator runs the helper's plan function
    ("report", "coschedule"),  # a report explains the helper's decisions
}

ROOMS = {
    # From the ground up: a room or module may use those before it; what is not named stands on top of all.
    "coschedule": (
        ("background", "lock", "log", "policy_settings", "record_intake", "wakeup"),
        ("housekeeping",),
        ("durations",),
        ("view",),
        ("planning",),
        ("acting", "wait_reasons"),
        ("pairs",),
        ("emptied",),
        ("changer",),
        ("comments",),
        ("tick",),
        ("answering", "publishing"),
        ("daemon",),
    ),
    "report": (
        ("charts", "cpu_advice", "distribution", "known_history", "roles", "slow_down", "task_decisions", "words"),
        ("job_lines",),
        ("groups",),
        ("summary",),
        ("over_time",),
        ("page",),
    ),
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        modules.update(name for name in names if name.startswith("slurm_gpushare."))
    return {module.split(".")[1] for module in modules} & LEVEL.keys()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    own = part(path)
    if own in {"__init__", "__main__"}:
        return
    assert own in LEVEL, f"{own} is in no layer: give it one here and in docs/architecture.md"
    for other in imported_parts(path) - {own}:
        assert LEVEL[other] < LEVEL[own] or (own, other) in MAY_ALSO_IMPORT, f"{path.name} of {own} imports {other}"


def room(package: str, module: str) -> int:
    """How high a part of a package stands; what is in no room is on top."""
    levels = {name: level for level, names in enumerate(ROOMS[package]) for name in names}
    return levels.get(module, len(ROOMS[package]))


def imported_rooms(path: Path, package: str) -> set[str]:
    prefix = f"slurm_gpushare.{package}."
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(prefix):
            found.update(f"{node.module}.{alias.name}".removeprefix(prefix).split(".")[0] for alias in node.names)
    return found


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_use_only_rooms_below_them(package: str) -> None:
    for path in sorted((PACKAGE / package).rglob("*.py")):
        own = path.relative_to(PACKAGE / package).parts[0].removesuffix(".py")
        for other in imported_rooms(path, package) - {own}:
            assert room(package, other) < room(package, own) or room(package, own) == len(ROOMS[package]), (
                f"{path.relative_to(PACKAGE)} uses {other}"
            )


def test_every_part_of_coschedule_has_its_place() -> None:
    parts = {path.stem for path in (PACKAGE / "coschedule").iterdir() if not path.name.startswith("_")}
    assert parts == {name for names in ROOMS["coschedule"] for name in names}


def test_the_product_never_imports_the_lab() -> None:
    """What a site installs works where the lab is not."""
    using = [path for path in sorted(PACKAGE.rglob("*.py")) if re.search(r"\bgpushare_lab\b", path.read_text())]
    assert using == []


def test_every_class_has_a_name_of_its_own() -> None:
    """A reader who meets a name knows which class is meant without looking at the imports."""
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
