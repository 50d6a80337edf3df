from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from slurm_gpushare.cli import main as cli
from slurm_gpushare.protocol.errors import BadInput, GpushareError


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    return int(stop.value.code or 0)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """A command that raises whatever the test puts in the list."""
    errors: list[Exception] = []

    @click.command()
    def fail() -> None:
        raise errors[0]

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: fail)
    return errors


def test_an_error_is_one_line_with_its_hint(failing: list[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(GpushareError("store: not\nthere", "Run this."))
    assert run(["fail"]) == 1
    assert capsys.readouterr().err == "gpushare: error: store: not there. Run this.\n"


def test_bad_input_exits_2(failing: list[Exception]) -> None:
    failing.append(BadInput("no"))
    assert run(["fail"]) == 2


def test_a_bug_is_one_line_too_and_a_traceback_only_with_debug(
    failing: list[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(ZeroDivisionError("oops"))
    assert run(["fail"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "fail"])


def test_a_missing_library_is_told_with_the_extra_that_brings_it(
    failing: list[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(ModuleNotFoundError("No module named 'scipy.stats'", name="scipy.stats"))
    assert run(["fail"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "slurm-gpushare[controller]" in said


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["frobnicate"]) == 2
    assert capsys.readouterr().err.startswith("gpushare: error: No such command 'frobnicate'")


@pytest.mark.parametrize("command", [["job", "--help"], ["configure", "--help"]])
def test_a_reader_that_goes_away_is_no_failure(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "slurm_gpushare", *command], stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_each_command_agrees_with_the_list() -> None:
    context = click.Context(cli.gpushare)
    for name, help_text in (cli.FOR_USERS | cli.FOR_ADMINISTRATORS).items():
        command = cli.gpushare.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(limit=200).rstrip(".") == help_text.rstrip("."), name


def test_words_of_earlier_releases_still_work_and_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["model", "show"], ["kb", "clusters", "show"]):
        assert run([*words, "--help"]) == 0
        assert "Show the model in force" in capsys.readouterr().out
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.index("Commands for users:") < said.index("  token ") < said.index("Commands for administrators:")
    assert "  model" not in said


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from slurm_gpushare.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in ('numpy', 'sklearn', 'sqlalchemy', 'scipy') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_told_as_that_and_not_as_a_bug(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slurm_gpushare", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "gpushare: error: output: cannot be written: No space left on device. Make room, or write elsewhere.\n"
    )
