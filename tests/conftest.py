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
    """Where a test's empty store is: an SQLite file, or the database that GPUSHARE_TEST_STORE names (tests/store)."""
    if url := os.environ.get("GPUSHARE_TEST_STORE"):
        empty_store(url)
        return url
    return f"sqlite:///{tmp_path}/store.sqlite"


def empty_store(url: str) -> None:
    """Make the store at `url` and remove what an earlier test left in it: much faster than a new database."""
    from slurm_gpushare.store import Store
    from slurm_gpushare.store.schema import METADATA, counter, schema_version

    with Store.create(url) as store, store.database.write() as connection:
        for table in METADATA.tables.values():
            if table is not schema_version:
                connection.execute(table.delete())
        connection.execute(counter.insert().values(name="writer", value=0))
