"""The small Debian package: what is in it, and that its environment runs. The long form is ``make test-packages``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIB = Path("usr/lib/slurm-gpushare")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's files, and its control files in DEBIAN/."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb")
    top = tmp_path_factory.mktemp("package")
    build = [sys.executable, ROOT / "packaging/build.py", "deb", "--node-only", "--out", top]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (deb,) = top.glob("slurm-gpushare_*.deb")
    subprocess.run(["dpkg-deb", "-R", deb, top / "tree"], check=True)
    return top / "tree"


def test_everything_is_where_the_system_looks_for_it(unpacked: Path) -> None:
    wanted = [
        "usr/bin/gpushare",
        "usr/lib/systemd/system/gpushare-backfill.service",
        "usr/lib/systemd/system/gpushare-metrics.timer",
        "usr/share/man/man1/gpushare.1.gz",
        "usr/share/man/man5/gpushare.conf.5.gz",
        "usr/share/bash-completion/completions/gpushare",
        "usr/share/doc/slurm-gpushare/copyright",
        "usr/share/doc/slurm-gpushare/examples/gpushare.conf",
        *(str(LIB / f"lib/python{python}/site-packages/gpushare-common.pth") for python in ("3.11", "3.13")),
        str(LIB / "common/slurm_gpushare/lua_bridge/job_submit.lua"),
    ]
    assert [name for name in wanted if not (unpacked / name).is_file()] == []
    unit = (unpacked / "usr/lib/systemd/system/gpushare-backfill.service").read_text()
    assert "ExecStart=/usr/bin/gpushare backfill" in unit
    assert "User=slurm" in unit
    assert "ReadWritePaths=-/run/gpushare -/var/lib/gpushare -/var/spool/gpushare\n" in unit
    assert os.access(unpacked / LIB / "common/slurm_gpushare/prolog/prolog.sh", os.X_OK)


def test_the_example_is_a_configuration_that_we_read(unpacked: Path) -> None:
    from slurm_gpushare.protocol.settings import KEYS, Place, parse_config

    example = (unpacked / "usr/share/doc/slurm-gpushare/examples/gpushare.conf").read_text()
    set_all = "\n".join(line[1:] for line in example.splitlines() if line.startswith("#") and line[1:2].isupper())
    assert parse_config(set_all) == parse_config("")
    assert len(set_all.splitlines()) == sum(key.place is Place.SITE for key in KEYS)


def test_the_command_runs_with_the_packages_own_libraries(unpacked: Path) -> None:
    command = (
        "import sys; sys.path[:0] = sys.argv[1:2]; del sys.argv[1]; from slurm_gpushare.__main__ import main; main()"
    )
    argv = [sys.executable, "-I", "-S", "-c", command, str(unpacked / LIB / "common"), "--version"]
    assert "version" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("script", sorted((ROOT / "packaging/scripts").iterdir()), ids=lambda path: path.name)
def test_maintainer_scripts_are_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True)
