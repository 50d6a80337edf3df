"""What commands go by where gpushare.conf is broken, away, or was never there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from world import FakeSlurm, node

from slurm_gpushare.cli import console as access
from slurm_gpushare.cli import metrics, report, status
from slurm_gpushare.cli.main import main
from slurm_gpushare.protocol.settings import DEFAULTS, Config
from slurm_gpushare.protocol.settings_in_force import settings_in_force
from slurm_gpushare.report.sources import PublishedSource, StoreSource
from slurm_gpushare.store.store import Store


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("GPUSHARE_CONF", str(tmp_path / "absent.conf"))
    here = replace(DEFAULTS, store_url=f"sqlite:///{tmp_path}/store.sqlite")
    monkeypatch.setattr(access, "DEFAULTS", here)
    return here


def test_without_settings_the_defaults_are_used_and_said_to_be(
    defaults: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert access.settings_or_defaults() == defaults
    said = capsys.readouterr().err
    assert "absent.conf: no such file" in said
    assert said.rstrip().endswith("The defaults are used.")
    assert access.settings_or_defaults(loud=False) == defaults
    assert capsys.readouterr().err == ""


def test_nobody_is_told_twice_that_nothing_is_set_up(defaults: Config, capsys: pytest.CaptureFixture[str]) -> None:
    figures = access.source(defaults, loud=True)
    assert isinstance(figures, PublishedSource)
    assert capsys.readouterr().err == ""
    absent = replace(defaults, source=Path("/etc/slurm/gpushare.conf"))
    assert access.readable_store(absent) is None
    assert "What the helper published is shown." in capsys.readouterr().err


def test_the_default_store_is_read_where_it_is(defaults: Config) -> None:
    Store.create(defaults.store_url).close()
    figures = access.source(access.settings_or_defaults())
    assert isinstance(figures, StoreSource)
    figures.store.close()


FAULTS: dict[str, Callable[[Path], object]] = {
    "a bad line": lambda conf: conf.write_text(conf.read_text() + "TickSecond=7\n"),
    "away": Path.unlink,
    "not UTF-8": lambda conf: conf.write_bytes(b"Policy=\xff\n"),
}


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """gpushare.conf of a site with a store, a node that shares and one that does not; the helper has read it."""
    conf = tmp_path / "gpushare.conf"
    places = {"StoreUrl": f"sqlite:///{tmp_path}/store.sqlite", "HookFile": f"{tmp_path}/hook.sqlite",
              "SpoolDir": f"{tmp_path}/spool", "PublicDir": f"{tmp_path}/public", "Partitions": "gpu"}  # fmt: skip
    conf.write_text("".join(f"{key}={value}\n" for key, value in places.items()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPUSHARE_CONF", str(conf))
    monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "lib" / "gpushare.conf.good"))
    slurm = FakeSlurm([], [node("shares"), node("other", partitions=("debug",))])
    monkeypatch.setattr(slurm, "accounting", lambda query: [])
    for command in (metrics, report, status):
        monkeypatch.setattr(command, "connect", lambda: slurm)
    Store.create(settings_in_force().store_url).close()
    return conf


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "command",
    ["status", "jobs", "report", "token list", "db check", "db strikes", "db audit", "kb bans", "kb show",
     "model show"],
)  # fmt: skip
def test_every_command_goes_by_the_last_good_settings_and_says_so_in_one_line(
    conf: Path, fault: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before, _ = run(capsys, *command.split(), "--json")
    assert code == 0
    FAULTS[fault](conf)
    code, out, err = run(capsys, *command.split(), "--json")
    told = [line for line in err.splitlines() if "are not known" not in line and "is not known" not in line]
    assert code == 0
    assert len(told) == 1
    assert told[0].startswith(f"gpushare: warning: {conf}")
    assert "The last good settings stay in force" in told[0]
    if command != "report":  # whose period has gone on
        assert json.loads(out) == json.loads(before)
    if command == "status":
        assert {line["node"] for line in json.loads(out)} == {"shares"}


def test_figures_for_prometheus_are_those_of_the_last_good_settings(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf.unlink()
    code, out, err = run(capsys, "metrics")
    assert (code, err.count("\n")) == (0, 1)
    assert 'gpushare_gpus{state="idle"} 2' in out.splitlines(), "the other node's do not share"
    assert "gpushare_helper_ticks_total 0" in out.splitlines(), "the store of the last good settings"


def test_doctor_still_calls_a_broken_file_the_problem(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAULTS["a bad line"](conf)
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 3
    (finding,) = json.loads(out)
    assert (finding["check"], finding["level"]) == ("gpushare.conf", "fail")


def test_no_command_reads_the_file_past_the_last_good_settings() -> None:
    for path in Path(access.__file__).parent.glob("*.py"):
        names = [alias.name for found in ast.walk(ast.parse(path.read_text())) if isinstance(found, ast.ImportFrom)
                 for alias in found.names]  # fmt: skip
        assert "load_config" not in names, f"{path.name}: use access.settings"


_AS_NOBODY = """
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from slurm_gpushare.cli import console as access
from slurm_gpushare.cli.main import main
access.settings_or_defaults()
main(["db", "strikes"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_who_may_not_read_the_last_good_settings_is_told_what_to_do() -> None:
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as name:
        folder, secret = Path(name), Path(name) / "lib"
        folder.chmod(0o755)
        secret.mkdir(mode=0o700)
        conf, good = folder / "gpushare.conf", secret / "good"
        good.write_text(f"# last good settings of {conf}\n")
        conf.write_text("Polcy=off\n")
        env = os.environ | {"GPUSHARE_CONF": str(conf), "GPUSHARE_LAST_GOOD": str(good)}
        argv = [sys.executable, "-c", _AS_NOBODY]
        result = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    told = (
        f"{conf}:1: unknown key 'Polcy'. The last good settings ({good}) are not yours to read: tell an administrator,"
        " or run this as SlurmUser."
    )
    assert result.stderr.splitlines() == [
        f"gpushare: warning: {told} The defaults are used.",
        f"gpushare: error: {told}",
    ]
    assert result.returncode == 2
