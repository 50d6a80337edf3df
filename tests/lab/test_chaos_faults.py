"""Faults of a chaos run hit somebody, or say that they did not."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare_lab.chaos import node_faults


def test_a_fault_that_meets_nobody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_faults, "PATIENCE_S", -1.0)
    with pytest.raises(AssertionError, match="no sampler was hit"):
        node_faults._until_hit(lambda: False, "sampler", lambda seconds: None)


def test_a_fault_tries_until_it_meets_somebody() -> None:
    tries, waited = iter([False, False, True]), []
    node_faults._until_hit(lambda: next(tries), "sampler", waited.append)
    assert len(waited) == 2


def test_only_who_holds_a_card_now_is_killed_in_a_hold(tmp_path: Path) -> None:
    """Begin, end, beat, whether it was answered, job: as prolog/epilog.sh writes them."""
    (tmp_path / "holds").write_text("1000 1900 5 0 7\n1500 2500 5 0 8\n1500 2500 5 1 9\n1800 2200 6 0 10\nnonsense\n")
    assert set(node_faults._open_holds([tmp_path / "holds", tmp_path / "none"], 2000)) == {"8", "10"}
