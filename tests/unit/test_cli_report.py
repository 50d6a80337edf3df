"""What ``gpushare report`` refuses before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_gpushare.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-S", "soon"], "'soon' is not a time"),
        (["-E", "2026-13-01"], "'2026-13-01' is not a time"),
        (["-S", "2026-11-02", "-E", "2026-11-01"], "the period is empty"),
        (["-u", "no-such-user"], "there is no user 'no-such-user'"),
        (["--json", "--csv"], "--json and --csv exclude each other"),
        (["--html", "report.html"], "report.html: exists already"),
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    said = capsys.readouterr().err
    assert (stop.value.code, said.count("\n")) == (2, 1)
    assert message in said
    assert (tmp_path / "report.html").read_text() == "mine"
