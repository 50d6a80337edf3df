"""Directories that the lab's commands write to."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare_lab.cli.main import main
from gpushare_lab.testbed.testbed import Testbed


@pytest.mark.parametrize("command", [["demo"], ["characterize", "/dev/null"]])
@pytest.mark.parametrize("out", ["/proc/self", "/etc/passwd/out"])
def test_a_directory_that_cannot_be_written_to_is_told_before_any_work(
    command: list[str],
    out: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Testbed, "up")
    bed = ["--dir", str(tmp_path / "bed")] if command == ["demo"] else []
    with pytest.raises(SystemExit) as stop:
        main([*command, "--out", out, *bed])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert f"--out {out}: cannot be written to: " in error
    assert not (tmp_path / "bed").exists()
