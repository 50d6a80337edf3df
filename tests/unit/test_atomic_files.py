from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slurm_gpushare.protocol.files import replace_text, replacing


def test_a_file_gets_its_text_and_mode_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    before = os.umask(0o077)
    try:
        replace_text(path, "new", 0o644, sync=True)
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def fail(draft: Path) -> None:
        draft.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replacing(path) as draft:
        fail(draft)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_private_draft_is_private_from_the_start(tmp_path: Path) -> None:
    with replacing(tmp_path / "f", 0o600) as draft:
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
