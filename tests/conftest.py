"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import NODE, Asker, EmulatedNode

from slurm_gpushare.testbed.emulator import build_library, create_node

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The measured data sets, which are not part of the repository."""
    path = Path(os.environ.get("GPUSHARE_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no measured data in {path}: set GPUSHARE_DATA")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm",
        choices=("bookworm", "trixie", "forky"),
        help="Debian release whose Slurm the tests of tests/real run on (default: this machine's)",
    )


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """Where a test's store is; the tests in tests/store put MariaDB in its place."""
    return f"sqlite:///{tmp_path}/store.sqlite"


@pytest.fixture(scope="session")
def nvml_lib_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the emulated libnvidia-ml.so.1."""
    return build_library(tmp_path_factory.mktemp("lib")).parent


@pytest.fixture(scope="session")
def nvml_asker(nvml_lib_dir: Path) -> Iterator[Asker]:
    asker = Asker(nvml_lib_dir)
    yield asker
    asker.close()


@pytest.fixture
def emulated_node(tmp_path: Path, nvml_lib_dir: Path, nvml_asker: Asker) -> EmulatedNode:
    """A node with two idle emulated V100s."""
    create_node(tmp_path / "emu", NODE, 2)
    return EmulatedNode(tmp_path / "emu", nvml_lib_dir, nvml_asker)
