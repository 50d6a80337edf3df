"""Pages that commands write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_gpushare.cli.main import main
from slurm_gpushare.cli.pages import check_page, write_page
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.testbed.slurm.testbed import Testbed


def test_a_page_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    before = os.umask(0)
    try:
        write_page(page, "who ran what")
        write_page(page, "who ran what since")
    finally:
        os.umask(before)
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.read_text() == "who ran what since"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("page", ["/proc/page.html", "/etc/passwd/page.html"])
def test_a_page_that_cannot_be_written_is_told_before_any_work(page: str) -> None:
    with pytest.raises(GpushareError, match=r"page\.html: cannot be written: "):
        check_page(Path(page), force=False)
    check_page(Path("/dev/null"), force=True)


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


@pytest.mark.parametrize("command", [["kb", "show", "--shipped"], ["model", "show"]])
def test_a_plot_of_no_known_kind_is_a_mistake(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--plot", "x.txt"])
    assert stop.value.code == 2
    assert "--plot x.txt: no kind of picture" in capsys.readouterr().err


def test_a_page_may_go_to_a_pipe() -> None:
    write_page(Path("/dev/null"), "nobody reads this")
    assert not Path("/dev/null").is_file()
