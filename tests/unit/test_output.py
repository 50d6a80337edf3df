from __future__ import annotations

import io

import pytest

from slurm_gpushare.cli.console import table, text_of, use_colour

COLUMNS = ("NODE", "ISD%>.1f")


def test_columns_are_aligned_and_lines_have_no_trailing_blanks() -> None:
    assert table(COLUMNS, [("gpu0", 3.14159), ("a", 110.0)]) == "NODE   ISD%\ngpu0    3.1\na     110.0"


def test_the_unknown_is_never_zero() -> None:
    assert [text_of(value) for value in (None, "", float("nan"), 0)] == ["---", "---", "---", "0"]


def test_delimited_output_is_not_padded() -> None:
    assert table(COLUMNS, [("gpu0", None)], header=False, delimiter="|") == "gpu0|---"


def test_an_empty_table_has_its_header_alone() -> None:
    assert table(COLUMNS, []) == "NODE  ISD%"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_needs_a_terminal_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not use_colour()
    monkeypatch.setattr("sys.stdout", Terminal())
    assert use_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour()
