"""What ``gpushare report`` refuses before it asks anybody."""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_gpushare.cli import report as command
from slurm_gpushare.cli.main import main
from slurm_gpushare.protocol.settings import DEFAULTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-S", "soon"], "'soon' is not a time"),
        (["-E", "2026-13-01"], "'2026-13-01' is not a time"),
        (["-S", "2026-11-02", "-E", "2026-11-01"], "the period is empty"),
        (["-u", "no-such-user"], "there is no user 'no-such-user'"),
        (["--json", "--csv"], "--json, --csv and --format exclude each other"),
        (["--csv", "--format=sacct"], "--json, --csv and --format exclude each other"),
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


def asked_of_accounting(
    arguments: list[str], slurm_user: str, monkeypatch: pytest.MonkeyPatch, uid: int = 4242
) -> list[str]:
    """Whose jobs a caller with `uid` would ask for."""
    asked: list[str] = []

    def collect(*arguments: object) -> None:
        asked.append(arguments[3].users)  # type: ignore[attr-defined]
        raise SystemExit(0)

    slurm = SimpleNamespace(config=lambda: {"SlurmUser": f"{slurm_user}(64030)"})
    monkeypatch.setattr(command, "connect", lambda: slurm)
    monkeypatch.setattr(command.console, "settings_or_defaults", lambda: DEFAULTS)
    monkeypatch.setattr(command, "collect", collect)
    monkeypatch.setattr(command.console, "check_users", lambda text: {int(name) for name in text.split(",") if name})
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(SystemExit):
        main(["report", *arguments])
    return asked


def test_a_user_gets_a_report_of_their_own_jobs_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked_of_accounting([], "slurm", monkeypatch) == ["alice"]
    assert asked_of_accounting(["-u", "4242"], "slurm", monkeypatch) == ["4242"]
    for others in ("1", "4242,1"):
        assert asked_of_accounting(["-u", others], "slurm", monkeypatch) == []
        assert "users see their own jobs" in capsys.readouterr().err


def test_root_and_slurm_user_get_a_report_of_anybodys_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of_accounting(["-u", "1"], "slurm", monkeypatch, uid=0) == ["1"]
    assert asked_of_accounting(["-u", "1"], "alice", monkeypatch) == ["1"]
    assert asked_of_accounting([], "alice", monkeypatch) == [""]
