"""Doctor about owners and modes: what others could change is named, with the command that ends it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.site import doctor
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Finding, Level
from slurm_gpushare.site.owner_checks import (
    Trusted,
    file_owners,
    helpers_directories,
    incoming_mode,
    script_owners,
    weak_places,
)

NOBODY, OTHER_GROUP = 65534, 65533
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
DIRECTORIES = {"spool": 0o711, "spool/incoming": 0o1733, "spool/public": 0o755, "state": 0o711, "lib": 0o700}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A site with the modes of the administrators' guide, whose SlurmUser runs these tests."""
    for name, mode in DIRECTORIES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "etc").mkdir()
    for file in (tmp_path / "lib/store.sqlite", tmp_path / "lib/hook.sqlite"):
        file.touch(0o600)
    conf = tmp_path / "etc/gpushare.conf"
    places = {"SpoolDir": "spool", "PublicDir": "spool/public", "StateDir": "state", "HookFile": "lib/hook.sqlite"}
    lines = [f"{key}={tmp_path}/{name}" for key, name in places.items()]
    conf.write_text("\n".join([*lines, f"SlurmUser={os.geteuid()}", f"StoreUrl=sqlite:///{tmp_path}/lib/store.sqlite"]))
    monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "lib/gpushare.conf.good"))
    return load_config(conf)


def of_files(config: Config) -> list[Finding]:
    checks = (file_owners, incoming_mode, helpers_directories)
    return [finding for check in checks for finding in check(config) if finding.level is not Level.PASS]


def mend(found: list[Finding]) -> None:
    for finding in found:
        subprocess.run(["sh", "-c", finding.fix.removeprefix("Run: ")], check=True)


def test_a_site_as_the_guide_says_has_no_finding(config: Config) -> None:
    assert of_files(config) == []
    (passed,) = file_owners(config)
    assert passed.level is Level.PASS


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("etc/gpushare.conf", "changes this site's settings"),
        ("etc", "changes this site's settings"),
        ("lib/store.sqlite", "changes what is known of every workload"),
        ("lib/hook.sqlite", "tells the hook whose a token is"),
        ("lib", "changes this site's settings"),  # the last good ones
        ("spool", "takes records away"),
        ("spool/public", "tells users what is not so"),
        ("state", "stops the helper"),
    ],
)
def test_what_everybody_can_write_fails_until_the_command_has_run(config: Config, name: str, loss: str) -> None:
    assert config.source is not None
    place = config.source.parents[1] / name
    place.chmod(place.stat().st_mode | 0o022)
    (finding,) = of_files(config)
    assert finding.level is Level.FAIL
    assert finding.found.startswith(f"{place} can be written by everybody: who writes there ")
    assert loss in finding.found
    assert "\n" not in finding.found + finding.fix
    mend([finding])
    assert of_files(config) == []


@needs_root
def test_another_owner_and_another_group_fail_too(config: Config) -> None:
    assert config.source is not None
    os.chown(config.source, NOBODY, OTHER_GROUP)
    config.source.chmod(0o664)
    (finding,) = of_files(config)
    assert f"belongs to nobody and can be written by group {OTHER_GROUP}: " in finding.found
    mend([finding])
    assert of_files(config) == []
    os.chown(config.source, 0, 0)
    config.source.chmod(0o664)
    assert of_files(config) == [], "root's own group is root's"


@needs_root
def test_slurm_users_own_group_is_slurm_users(config: Config) -> None:
    assert config.source is not None
    os.chown(config.source, NOBODY, 65534)
    config.source.chmod(0o664)
    assert list(weak_places(config.source, Trusted.users("nobody"))) == []
    assert len(list(weak_places(config.source, Trusted.users()))) == 1


def test_a_link_is_as_weak_as_where_it_leads(config: Config, tmp_path: Path) -> None:
    weak = tmp_path / "weak"
    weak.mkdir()
    weak.chmod(0o777)
    (weak / "gpushare.conf").touch(0o644)
    (tmp_path / "link").symlink_to(weak / "gpushare.conf")
    trusted = Trusted.users(str(os.geteuid()))
    assert [place for place, *_ in weak_places(tmp_path / "link", trusted)] == [weak]
    weak.chmod(0o1777)
    assert list(weak_places(tmp_path / "link", trusted)) == [], "others add files there, and change none"


def test_every_link_on_the_way_counts_with_the_directory_that_it_is_in(tmp_path: Path) -> None:
    weak, trusted = tmp_path / "weak", Trusted.users(str(os.geteuid()))
    weak.mkdir()
    (tmp_path / "gpushare.conf").touch(0o644)
    (weak / "hop").symlink_to("../gpushare.conf")
    (tmp_path / "link").symlink_to("weak/hop")
    assert list(weak_places(tmp_path / "link", trusted)) == []
    weak.chmod(0o777)
    assert [place for place, *_ in weak_places(tmp_path / "link", trusted)] == [weak]


@needs_root
def test_a_link_of_somebody_else_in_a_sticky_directory_is_weak(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (tmp_path / "gpushare.conf").touch(0o644)
    (sticky / "link").symlink_to(tmp_path / "gpushare.conf")
    assert list(weak_places(sticky / "link", Trusted.users())) == []
    os.chown(sticky / "link", NOBODY, NOBODY, follow_symlinks=False)
    ((_, found, fix),) = weak_places(sticky / "link", Trusted.users())
    assert found == f"{sticky}/link is a link of nobody"
    subprocess.run(["sh", "-c", fix.removeprefix("Run: ")], check=True)
    assert list(weak_places(sticky / "link", Trusted.users())) == []


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        (0o733, "remove each other's records"),
        (0o1777, "list each other's records"),
        (0o1700, "cannot leave records"),
    ],
)
def test_the_spool_has_the_one_mode_that_keeps_records_apart(config: Config, mode: int, loss: str) -> None:
    (config.spool_dir / "incoming").chmod(mode)
    (finding,) = of_files(config)
    assert (finding.check, finding.level) == ("spool-mode", Level.FAIL)
    assert loss in finding.found
    mend([finding])
    assert of_files(config) == []


@needs_root
def test_directories_that_the_helper_cannot_use_are_named(config: Config) -> None:
    config = replace(config, slurm_user=str(NOBODY))
    os.chown(config.state_dir.parent / "lib", NOBODY, NOBODY)
    found = of_files(config)
    assert {(finding.check, finding.fix) for finding in found} == {
        ("spool-mode", f"Run: chown {NOBODY} {config.spool_dir}/incoming"),
        ("helper-directory", f"Run: chown {NOBODY} {config.spool_dir}"),
        ("helper-directory", f"Run: chown {NOBODY} {config.state_dir}"),
        ("helper-directory", f"Run: chown {NOBODY} {config.public_dir}"),
    }
    mend(found)
    assert of_files(config) == []
    config.spool_dir.chmod(0o700)
    (finding,) = of_files(config)
    assert "closed to others" in finding.found
    for path in (config.spool_dir, config.state_dir):
        os.chown(path, 0, NOBODY)
        path.chmod(0o771)
    assert of_files(config) == [], "its group will do"


@needs_root
def test_a_directory_of_the_store_alone_is_looked_at_too(config: Config, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir(0o700)
    for path in (
        config.state_dir,
        config.spool_dir,
        config.spool_dir / "incoming",
        config.public_dir,
        tmp_path / "lib",
    ):
        os.chown(path, NOBODY, NOBODY)
    config = replace(config, slurm_user=str(NOBODY), store_url=f"sqlite:///{apart}/store.sqlite")
    (finding,) = of_files(config)
    assert (finding.check, finding.fix) == ("helper-directory", f"Run: chown {NOBODY} {apart}")


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_what_is_published_is_for_all_users_to_read(config: Config, mode: int) -> None:
    config.public_dir.chmod(mode)
    (finding,) = of_files(config)
    assert (finding.check, finding.level) == ("helper-directory", Level.WARN)
    mend([finding])
    assert of_files(config) == []


@pytest.fixture
def scripts(config: Config, tmp_path: Path) -> SiteSetup:
    """A site whose scripts are all in place."""
    etc, package = tmp_path / "etc", tmp_path / "package"
    (etc / "prolog.d").mkdir()
    (package / "bin").mkdir(parents=True)
    run = f"#!/bin/sh\nexport GPUSHARE_PYTHON={package}/bin/python\n{package}/prolog.sh\n"
    own = f'dofile("{etc}/gpushare_submit.lua")\n'
    texts = {
        etc / "prolog.d/50-gpushare": run, etc / "gpushare_task_prolog": run, package / "prolog.sh": "",
        package / "bin/python": "", etc / "job_submit.lua": own, etc / "gpushare_submit.lua": "",
        etc / "cli_filter.lua": "-- gpushare",
    }  # fmt: skip
    for path, text in texts.items():
        path.write_text(text)
        path.chmod(0o755)
    slurm = {"Prolog": f"{etc}/prolog.d/*", "TaskProlog": f"{etc}/gpushare_task_prolog"}
    files = {name: (etc / name).read_text() for name in ("job_submit.lua", "cli_filter.lua")}
    return SiteSetup(Release(24, 11, 5), slurm, (), (), None, etc, files)


def of_scripts(scripts: SiteSetup, config: Config) -> list[Finding]:
    return [finding for finding in script_owners(scripts, config) if finding.level is not Level.PASS]


@pytest.mark.parametrize(
    ("name", "loss", "level"),
    [
        ("etc/job_submit.lua", "in slurmctld", Level.FAIL),
        ("etc/gpushare_submit.lua", "in slurmctld", Level.FAIL),
        ("etc/cli_filter.lua", "in everybody's sbatch", Level.FAIL),
        ("etc/prolog.d", "as root on the nodes", Level.FAIL),
        ("etc/prolog.d/50-gpushare", "as root on the nodes", Level.FAIL),
        ("etc/gpushare_task_prolog", "as everybody on the nodes", Level.FAIL),
        ("package/prolog.sh", "as root on the nodes", Level.WARN),
        ("package/bin", "as root on the nodes", Level.WARN),
    ],
)
def test_code_that_others_can_change_is_named_by_where_it_runs(
    scripts: SiteSetup, config: Config, name: str, loss: str, level: Level
) -> None:
    assert of_scripts(scripts, config) == []
    place = scripts.etc.parent / name
    place.chmod(0o777)
    (finding,) = of_scripts(scripts, config)
    assert (finding.check, finding.level) == ("script-owners", level)
    assert f"{place} can be written by everybody: who writes there has code run {loss}" in finding.found
    mend([finding])
    assert of_scripts(scripts, config) == []


def test_a_compute_node_has_no_hook_to_guard(scripts: SiteSetup, config: Config) -> None:
    (scripts.etc / "job_submit.lua").chmod(0o777)
    assert of_scripts(replace(scripts, is_controller=False), config) == []


@pytest.mark.parametrize("of", ["SITE_CHECKS", "MACHINE_CHECKS"])
def test_a_check_that_may_not_look_says_so(config: Config, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """Whoever runs it; the others still run."""

    def closed(*_: object) -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/var/lib/gpushare/hook.sqlite")

    monkeypatch.setattr(doctor, "load_config", lambda: config)
    monkeypatch.setattr(doctor, "connect", lambda: None)
    monkeypatch.setattr(doctor, "collect", lambda _: SiteSetup(Release(24, 11, 5), {}, (), (), None, Path("/x"), {}))
    for checks in ("SITE_CHECKS", "MACHINE_CHECKS"):
        monkeypatch.setattr(doctor, checks, (closed,) * (checks == of) + (file_owners,) * (checks == "MACHINE_CHECKS"))
    found = {finding.check: finding for finding in doctor.examine()}
    assert found["closed"].found == "/var/lib/gpushare/hook.sqlite is not yours to see"
    assert "owners" in found
