"""The systemd units: what they may do is what the helper needs at this site, by systemd's own measure."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import DEFAULTS, parse_config
from slurm_gpushare.site import units
from slurm_gpushare.site.configure import pieces
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import Level
from slurm_gpushare.site.units import UnitSite, settings_of_places, unit_pieces, unit_site

USUAL = UnitSite(Path("/usr/bin/gpushare"), "slurm")
MOVED = """\
StateDir=/run/slurm/gpushare
SpoolDir=/shared/my spool
PublicDir=/shared/public
StoreUrl=sqlite:////srv/gpushare/store.sqlite
HookFile=/srv/hook/hook.sqlite
GuestCap=a lot
"""
FACTS = SiteSetup(Release(24, 11, 5), {"SlurmUser": "hpc(77)"}, (), (), None, Path("/opt/slurm/etc"), {})
ELSEWHERE = unit_site(FACTS, Path("/opt/venv/bin/gpushare"), MOVED, "/opt/slurm/bin/scontrol")
AT_HOME = replace(USUAL, config=replace(DEFAULTS, spool_dir=Path("/home/shared/spool")))
SERVICES = ("gpushare-backfill", "gpushare-metrics", "gpushare-watchdog")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")


def unit(site: UnitSite, name: str) -> str:
    return next(piece.text for piece in unit_pieces(site) if piece.name == f"systemd/{name}.service")


@needs_systemd
@pytest.mark.parametrize("site", [USUAL, ELSEWHERE, AT_HOME], ids=["usual", "elsewhere", "at home"])
@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_is_well_shielded_and_understood(name: str, site: UnitSite, tmp_path: Path) -> None:
    filled = tmp_path / f"{name}.service"
    filled.write_text(unit(replace(site, command=Path("/bin/true")), name))
    command = ["systemd-analyze", "verify", "--man=no", str(filled)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in verified.stderr.splitlines() if name in line] == [], "systemd understands every line"
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(filled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr or "Unknown" in done.stderr:
        pytest.skip("this systemd cannot judge a file")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) < 3.0


def test_at_the_usual_places_the_helper_may_write_what_it_must_and_nothing_else() -> None:
    backfill = unit(USUAL, "gpushare-backfill")
    assert "\nRuntimeDirectory=gpushare\n" in backfill
    assert "\nStateDirectory=gpushare\n" in backfill
    assert "\nReadWritePaths=-/run/gpushare -/var/lib/gpushare -/var/spool/gpushare\n" in backfill
    assert "\nReadWritePaths=-/var/lib/gpushare\n" in unit(USUAL, "gpushare-metrics")
    for name in SERVICES:
        assert {"ProtectHome=yes", "PrivateTmp=yes"} <= set(unit(USUAL, name).splitlines())
        assert "Environment=" not in unit(USUAL, name)


def test_units_follow_a_site_whose_files_are_elsewhere() -> None:
    """A mistake in another line of gpushare.conf is not theirs to name."""
    backfill = unit(ELSEWHERE, "gpushare-backfill")
    store = "-/srv/gpushare -/srv/hook -/var/lib/gpushare"
    assert "\nRuntimeDirectory=slurm/gpushare\n" in backfill
    assert f'\nReadWritePaths=-/run/slurm/gpushare {store} "-/shared/my spool" -/shared/public\n' in backfill
    assert f"\nReadWritePaths={store}\n" in unit(ELSEWHERE, "gpushare-metrics")
    for name in SERVICES:
        lines = unit(ELSEWHERE, name).splitlines()
        assert "User=hpc" in lines
        assert "Environment=SLURM_CONF=/opt/slurm/etc/slurm.conf" in lines
        assert "Environment=PATH=/opt/slurm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin" in lines
        assert any(line.startswith("ExecStart=/opt/venv/bin/gpushare ") for line in lines)
        assert not any("/var/spool/gpushare" in line for line in lines)
        assert not re.search(r"@[A-Z_]+@", unit(ELSEWHERE, name))


@pytest.mark.parametrize(
    ("change", "homes", "temporary"),
    [
        (
            {"config": replace(DEFAULTS, spool_dir=Path("/home/spool"), public_dir=Path("/home/spool/p"))},
            "read-only",
            "yes",
        ),
        ({"command": Path("/root/venv/bin/gpushare")}, "read-only", "yes"),
        ({"slurm_bin": Path("/home/slurm/24.11/bin")}, "read-only", "yes"),
        ({"config": replace(DEFAULTS, store_url="file:/root/gpushare.url")}, "read-only", "yes"),
        ({"etc": Path("/tmp/site/etc")}, "yes", "no"),
        ({"config": replace(DEFAULTS, state_dir=Path("/data/state"))}, "yes", "yes"),
    ],
)
def test_what_the_helper_needs_is_not_hidden_from_it(change: dict[str, object], homes: str, temporary: str) -> None:
    site = replace(USUAL, **change)  # type: ignore[arg-type]
    lines = unit(site, "gpushare-backfill").splitlines()
    assert f"ProtectHome={homes}" in lines
    assert f"PrivateTmp={temporary}" in lines
    assert ("RuntimeDirectory=" in lines) == (site.config.state_dir == Path("/data/state"))


def test_a_store_that_is_no_file_needs_no_directory() -> None:
    places = settings_of_places("StoreUrl=mysql+pymysql://a@b/c\nHookFile=/srv/hook/hook.sqlite\n")
    assert replace(USUAL, config=places).store == [Path("/srv/hook"), Path("/var/lib/gpushare")]
    assert places.store_file is None


def test_configure_takes_the_places_from_the_sites_own_file() -> None:
    facts = replace(FACTS, files={"gpushare.conf": MOVED})
    conf = next(
        p.text
        for p in pieces(facts, replace(DEFAULTS, partitions=("gpu",), gpu_models=("v100",)))
        if p.name == "gpushare.conf"
    )
    written = {piece.name: piece.text for piece in unit_pieces(unit_site(facts, USUAL.command, conf, None))}
    assert '"-/shared/my spool"' in written["systemd/gpushare-backfill.service"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the administrator's units are, and the package's."""
    etc, usr = tmp_path / "etc", tmp_path / "usr"
    monkeypatch.setattr(units, "FOLDERS", (etc, usr))
    for folder in (etc, usr):
        folder.mkdir()
    return etc, usr


def install(folder: Path, site: UnitSite, command: str = "/bin/true") -> None:
    for piece in unit_pieces(replace(site, command=Path(command))):
        (folder / Path(piece.name).name).write_text(piece.text)


def examined(site: UnitSite, **changes: object) -> list[tuple[Level, str]]:
    facts = replace(FACTS, etc=site.etc, config={"SlurmUser": f"{site.user}(77)"}, **changes)  # type: ignore[arg-type]
    return [(finding.level, finding.found) for finding in units.installed_units(facts, site.config)]


def test_doctor_says_where_installed_units_do_not_fit_the_settings(folders: tuple[Path, Path]) -> None:
    etc, usr = folders
    assert examined(ELSEWHERE) == [], "none is installed"
    install(usr, USUAL)
    assert [level for level, _ in examined(USUAL)] == [Level.PASS]
    ((level, found),) = examined(ELSEWHERE)
    assert level is Level.WARN
    for part in (
        "gpushare-backfill.service runs as slurm, and SlurmUser is hpc",
        "does not let it write /run/slurm/gpushare",
        "does not let it write /shared/my spool",
        "does not say that slurm.conf is in /opt/slurm/etc",
    ):
        assert part in found
    assert "/var/lib/gpushare" not in found
    assert examined(ELSEWHERE, is_controller=False) == [], "no helper runs on a node"
    install(etc, ELSEWHERE)
    assert [level for level, _ in examined(ELSEWHERE)] == [Level.PASS], "the administrator's count"


def test_doctor_names_a_unit_whose_command_has_gone(folders: tuple[Path, Path]) -> None:
    etc, _ = folders
    install(etc, USUAL, "/opt/removed/bin/gpushare")
    ((level, found),) = examined(USUAL)
    assert (level, found) == (
        Level.WARN, "gpushare-backfill.service starts /opt/removed/bin/gpushare, which is not there",
    )  # fmt: skip


def test_doctor_reads_drop_ins_too(folders: tuple[Path, Path]) -> None:
    etc, usr = folders
    install(usr, USUAL)
    moved = replace(USUAL, config=parse_config("SpoolDir=/home/spool\nPublicDir=/home/spool/public\n"))
    ((_, found),) = examined(moved)
    assert "does not let it write /home/spool" in found
    assert "hides home directories" in found
    for name in SERVICES:
        (etc / f"{name}.service.d").mkdir()
        (etc / f"{name}.service.d/site.conf").write_text(
            "[Service]\nReadWritePaths=/home/spool\nProtectHome=read-only\n"
        )
    assert [level for level, _ in examined(moved)] == [Level.PASS]
    (etc / "gpushare-backfill.service.d/z.conf").write_text("[Service]\nReadWritePaths=\n")
    assert "does not let it write /home/spool" in examined(moved)[0][1], "an empty line takes back what was before"


def test_doctor_judges_no_unit_that_is_masked_and_minds_no_link_to_nowhere(folders: tuple[Path, Path]) -> None:
    etc, usr = folders
    install(usr, USUAL)
    (etc / "gpushare-backfill.service.d").mkdir()
    (etc / "gpushare-backfill.service.d/gone.conf").symlink_to("/no/such/file")
    assert [level for level, _ in examined(USUAL)] == [Level.PASS]
    for name in SERVICES:
        (etc / f"{name}.service").symlink_to("/dev/null")
    assert examined(ELSEWHERE) == []


def test_a_store_behind_a_link_may_be_written_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store.sqlite").symlink_to(tmp_path / "disk/store.sqlite")
    site = replace(USUAL, config=parse_config(f"StoreUrl=sqlite:///{tmp_path}/store.sqlite\n"))
    assert {tmp_path, tmp_path / "disk"} <= set(site.store)
