"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
