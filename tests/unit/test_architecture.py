"""The house of docs/architecture.md, read off the imports and the names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "slurm_gpushare"
ROOMS = (
    {"protocol"},
    {"slurm", "store", "knowledge", "node"},
    {"helper"},
    {"whatif", "report", "site"},
    {"cli"},
)
"""From the ground up: a room imports from those below it, and from those beside it only what is named here."""
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
MAY_ALSO_IMPORT = {
    ("store", "node"),  # a run's own figures are worked out by the room that measured it
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(path: Path, *, when_loaded: bool = False) -> Iterator[str]:
    """The modules that one imports, as ``room/module.py``; `when_loaded` leaves out what waits for a call."""
    tree = ast.parse(path.read_text())
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slurm_gpushare"):
            for name in {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}:
                found = PACKAGE.parent / (name.replace(".", "/") + ".py")
                if found.is_file():
                    yield named(found)


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__main__":
        return
    assert own in LEVEL, f"{own} is no room: give it one here and in docs/architecture.md"
    for module in imported(path):
        other = module.split("/")[0]
        allowed = other == own or LEVEL[other] < LEVEL[own] or (own, other) in MAY_ALSO_IMPORT
        assert allowed, f"{named(path)} imports {module}"


def test_no_module_needs_itself_to_be_loaded() -> None:
    """A circle of imports would mean that its modules are one."""
    needs = {named(path): set(imported(path, when_loaded=True)) for path in MODULES}
    while ready := [module for module, others in needs.items() if not others & needs.keys()]:
        for module in ready:
            del needs[module]
    assert needs == {}


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_a_program_starts_after_its_last_line(path: Path) -> None:
    """What stands behind ``if __name__ == "__main__"`` does not exist yet when the program runs."""
    if path.name == "__main__.py":
        return
    *others, _last = ast.parse(path.read_text()).body
    assert not [node.lineno for node in others if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]


def test_every_module_has_a_name_of_its_own() -> None:
    """Commands aside, which are named after what people type."""
    times = Counter(path.name for path in MODULES if path.parent.name != "cli")
    assert {name for name, count in times.items() if count > 1} == set()


def test_the_product_never_imports_the_lab() -> None:
    """What a site installs works where the lab is not."""
    assert [path for path in MODULES if re.search(r"\bgpushare_lab\b", path.read_text())] == []


def test_every_class_has_a_name_of_its_own() -> None:
    """A reader who meets a name knows which class is meant without looking at the imports."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(named(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
