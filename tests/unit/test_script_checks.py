"""Doctor about the scripts that Slurm runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import parse_config
from slurm_gpushare.site import current_setup, doctor
from slurm_gpushare.site.configure import _lua_lines
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, Level
from slurm_gpushare.site.script_checks import hold_setup, hook, prologs


def facts(tmp_path: Path, **slurm_conf: str) -> SiteSetup:
    return SiteSetup(Release(24, 11, 5), slurm_conf, (), (), None, tmp_path, {})


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path / "lib/slurm_gpushare/prolog.sh", "#!/bin/bash\n")


@pytest.fixture
def dropped_in(tmp_path: Path, package: Path) -> Path:
    return write(tmp_path / "prolog.d/50-gpushare", f"#!/bin/sh\nexport GPUSHARE_PYTHON=/bin/true\n{package}\nexit 0\n")


def prolog(tmp_path: Path, path: Path) -> Finding:
    found = prologs(facts(tmp_path, Prolog=str(path)), parse_config(""))
    return next(finding for finding in found if finding.check == "prolog")


def test_a_directory_of_prologs_with_ours_in_it_passes(tmp_path: Path, dropped_in: Path) -> None:
    write(dropped_in.with_name("10-site"), "#!/bin/sh\n/opt/site/away\n")
    assert prolog(tmp_path, dropped_in.with_name("*")).level is Level.PASS
    dropped_in.unlink()
    assert "does not call us" in prolog(tmp_path, dropped_in.with_name("*")).found


def test_a_prolog_that_nobody_may_run_fails(tmp_path: Path, dropped_in: Path) -> None:
    dropped_in.chmod(0o644)
    found = prolog(tmp_path, dropped_in.with_name("*"))
    assert found.level is Level.FAIL
    assert "50-gpushare is not executable: nodes drain" in found.found


def test_a_task_prolog_that_is_away_fails_every_srun(tmp_path: Path) -> None:
    found = prologs(facts(tmp_path, TaskProlog=str(tmp_path / "gpushare_task_prolog")), parse_config(""))
    assert any("is missing: every srun fails" in finding.found for finding in found)


@pytest.mark.parametrize("gone", ["dropped_in", "package"])
@pytest.mark.parametrize("call", ["{}", "exec {}", "  {} || true", ". {}"])
def test_a_prolog_that_runs_what_is_missing_fails(
    gone: str, call: str, tmp_path: Path, dropped_in: Path, package: Path
) -> None:
    own = write(tmp_path / "own_prolog", f"#!/bin/sh\n/opt/site/away\n{call.format(dropped_in)}\n")
    assert prolog(tmp_path, own).level is Level.PASS, "what a site runs besides is its own affair"
    path = {"dropped_in": dropped_in, "package": package}[gone]
    path.unlink()
    assert prolog(tmp_path, own).level is Level.FAIL
    assert f"runs {path}, which is missing" in prolog(tmp_path, own).found


def test_a_controller_without_the_script_that_slurmctld_needs_fails(tmp_path: Path) -> None:
    script = write(tmp_path / "gpushare_epilog_slurmctld", "")
    controller = facts(tmp_path, SlurmUser="slurm(64030)", EpilogSlurmctld=str(script), JobSubmitPlugins="lua")

    def failures(site: SiteSetup) -> list[str]:
        config = parse_config("SlurmUser=slurm")
        return [
            found.check for check in (hold_setup, hook) for found in check(site, config) if found.level is Level.FAIL
        ]

    assert failures(controller) == ["hook"], "there is no job_submit.lua"
    script.unlink()
    assert failures(controller) == ["hold", "hook"]
    assert failures(replace(controller, is_controller=False)) == [], "a compute node needs neither"


@pytest.mark.parametrize(
    ("host", "daemon", "expected"),
    [("ctl(10.0.0.1)", "bash", True), ("ctl.site.org", "bash", True), ("n1", "bash", False), ("n1", "slurmctld", True)],
)
def test_a_controller_is_known_by_its_name_or_its_daemon(
    host: str, daemon: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_setup.socket, "gethostname", lambda: "ctl.cluster")
    monkeypatch.setattr(current_setup.psutil, "process_iter", lambda names: [SimpleNamespace(info={"name": daemon})])
    assert current_setup._is_controller({"SlurmctldHost[0]": host, "ClusterName": "ctl"}) is expected


def test_lines_for_a_script_of_the_sites_say_where_they_go() -> None:
    """A 'return' ends a Lua script: lines after it are a mistake, and slurmctld would not start."""
    said = _lua_lines(Path("/etc/slurm/gpushare_submit.lua"))
    assert "before a 'return' at its end" in said
    assert all(line.startswith("--") for line in said.splitlines()[:2])


def test_doctor_on_a_compute_node_asks_for_nothing_that_only_the_controller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(f"StoreUrl=sqlite:///{tmp_path}/none\nHookFile={tmp_path}/none\nSpoolDir={tmp_path}\n")
    site = facts(tmp_path)
    monkeypatch.setattr(doctor, "load_config", lambda: config)
    monkeypatch.setattr(doctor, "connect", lambda: None)
    monkeypatch.setattr(doctor, "SITE_CHECKS", ())
    checks = {}
    for controller in (True, False):
        monkeypatch.setattr(doctor, "collect", lambda _, here=controller: replace(site, is_controller=here))
        checks[controller] = {finding.check for finding in doctor.examine()}
    assert checks[True] - checks[False] == {"store", "hook-file", "lease", "helper-directory"}
    assert checks[False] - checks[True] == {"machine"}
