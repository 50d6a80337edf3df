"""The layers of docs/architecture.md, read off the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "slurm_gpushare"
LAYERS = (
    {"errors", "resources"},
    {"config", "tokens"},
    {"telemetry", "store", "knowledge", "slurm"},
    {"report", "coschedule", "simulate", "site", "testbed"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAY_ALSO_IMPORT = {
    ("store", "telemetry"),  # records come in as telemetry's dataclasses
    ("simulate", "coschedule"),  # the simulator runs the helper's plan function
    ("report", "coschedule"),  # a report explains the helper's decisions
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
    if own not in LEVEL:
        return
    for other in imported_parts(path) - {own}:
        assert LEVEL[other] < LEVEL[own] or (own, other) in MAY_ALSO_IMPORT, f"{path.name} of {own} imports {other}"
