"""The built wheel, installed with pip away from the checkout, has everything that is not Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ("lua_bridge", "prolog", "share", "sql")
SOURCES = ("setup.cfg", "pyproject.toml", "PYPI.md", "LICENSE", "slurm_gpushare", *DATA)


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")


LAB = ("setup.cfg", "pyproject.toml", "README.md", "gpushare_lab")


def build_wheel(top: Path, root: Path = ROOT, sources: tuple[str, ...] = SOURCES) -> Path:
    """The wheel of `root`, built below `top` from a copy: building leaves files behind."""
    for name in sources:
        if (root / name).is_dir():
            shutil.copytree(root / name, top / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (top / "source").mkdir(exist_ok=True, parents=True)
            shutil.copy(root / name, top / "source" / name)
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", top, top / "source"], check=True)
    (wheel,) = top.glob("*.whl")
    return wheel


def installed(top: Path, wheel: Path) -> Path:
    subprocess.run([*PIP, "install", "--no-deps", "--target", top / "site", wheel], check=True)
    return top / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel was installed."""
    top = tmp_path_factory.mktemp("wheel")
    return installed(top, build_wheel(top))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the lab's wheel was installed."""
    top = tmp_path_factory.mktemp("lab")
    return installed(top, build_wheel(top, ROOT / "lab", LAB))


def run(site: Path, *arguments: str) -> str:
    """Python with the installed package first, run where no checkout is."""
    env = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=site, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("name", DATA)
def test_the_wheel_has_every_file_of(site: Path, name: str) -> None:
    code = f"from slurm_gpushare.protocol.files import resource_dir as r; print(r('{name}'))"
    found = Path(run(site, "-c", code).strip())
    assert site in found.parents
    wanted = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*") if path.is_file()}
    assert {path for path in wanted if "__pycache__" not in path.parts} <= {
        path.relative_to(found) for path in found.rglob("*")
    }


def test_scripts_of_the_wheel_can_be_run(site: Path) -> None:
    assert all(os.access(site / "slurm_gpushare" / "prolog" / name, os.X_OK) for name in ("prolog.sh", "epilog.sh"))


def test_the_command_of_the_wheel_runs(site: Path) -> None:
    assert "Usage: gpushare " in run(site, "-m", "slurm_gpushare", "--help")
    assert (site / "bin" / "gpushare").exists()


def test_a_site_gets_nothing_of_the_lab(site: Path) -> None:
    assert not (site / "gpushare_lab").exists()
    assert not [path for path in site.rglob("*") if path.suffix in {".c", ".h"}]


def test_the_emulated_gpu_is_built_from_the_lab_s_wheel(lab: Path, tmp_path: Path) -> None:
    build = "from pathlib import Path; import gpushare_lab.emulator as e; print(e.__file__); "
    assert str(lab) in run(lab, "-c", f"{build} e.build_library(Path('{tmp_path}'))")
    assert (tmp_path / "libnvidia-ml.so.1").exists()
    assert (lab / "bin" / "gpushare-lab").exists()
