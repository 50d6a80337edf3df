"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import NODE, Asker, EmulatedNode
from hypothesis import HealthCheck, settings

from slurm_gpushare.testbed.emulator import build_library, create_node

ROOT = Path(__file__).resolve().parents[1]

# Hypothesis fails an example that takes 0.2 s, which on a busy machine says nothing; and all runs try the same ones.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The measured data sets, which are not part of the repository."""
    path = Path(os.environ.get("GPUSHARE_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no measured data in {path}: set GPUSHARE_DATA")
    return path


def pytest_configure() -> None:
    """Signals as in a terminal: a shell's background job, and so all that tests start, would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


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
