"""The table of attacks that ``make abuse`` prints: what was tried, what must come of it, what did."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

COLUMNS = (("attack", 58), ("expected", 34), ("seen", 34))


@pytest.fixture
def verdict(record_property: Callable[[str, object], None]) -> Callable[[str, str, str], None]:
    """Writes an attack down and fails where what was seen is not what must be."""

    def write(attack: str, expected: str, seen: str) -> None:
        for name, value in (("attack", attack), ("expected", expected), ("seen", seen)):
            record_property(name, value)
        assert seen == expected

    return write


def _lines(cells: dict[str, str], last: str) -> list[str]:
    wrapped = [textwrap.wrap(cells.get(name, ""), width) or [""] for name, width in COLUMNS]
    height = max(len(lines) for lines in wrapped)
    rows = []
    for number in range(height):
        parts = [
            (lines[number] if number < len(lines) else "").ljust(width)
            for lines, (_, width) in zip(wrapped, COLUMNS, strict=True)
        ]
        rows.append("  ".join([*parts, last if number == 0 else ""]).rstrip())
    return rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One row for each attack of this run."""
    found = [
        (dict(report.user_properties), report.passed)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and "attack" in dict(report.user_properties)
    ]
    # One that came to no answer is not held either.
    found += [
        ({"attack": report.nodeid.rpartition("::")[2], "seen": "no answer"}, False)
        for outcome in ("failed", "error")
        for report in terminalreporter.stats.get(outcome, [])
        if "tests/abuse/" in report.nodeid and "attack" not in dict(report.user_properties)
    ]
    if not found:
        return
    terminalreporter.section("attacks")
    for line in _lines({name: name.upper() for name, _ in COLUMNS}, "VERDICT"):
        terminalreporter.write_line(line)
    for cells, held in found:
        for line in _lines({name: str(value) for name, value in cells.items()}, "held" if held else "BROKEN"):
            terminalreporter.write_line(line)
    terminalreporter.write_line(f"{sum(held for _, held in found)} of {len(found)} held")
