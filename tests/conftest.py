"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import NODE, Asker, EmulatedNode
from gpushare_lab.emulator import build_library, create_node
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.environment import closed_directory
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.reset import reset
from gpushare_lab.testbed.testbed import Testbed
from hypothesis import HealthCheck, settings

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
    """Signals as in a terminal: all that tests start would ignore what nohup or a shell's background job ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A directory that every user may enter, with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_suite(request: pytest.FixtureRequest) -> str | None:
    """The Debian release whose Slurm is tested; None: this machine's."""
    suite: str | None = request.config.option.slurm
    return suite


@pytest.fixture(scope="session")
def testbed_session(slurm_suite: str | None, short_tmp: Path) -> Iterator[Testbed]:
    if os.geteuid():
        pytest.skip("a real Slurm needs root")
    if shutil.which("munged") is None:
        pytest.skip("no munge: run scripts/setup.sh")
    if closed := closed_directory():
        pytest.skip(f"ordinary users cannot read this checkout in {closed}: use 'make test', or scripts/readable.sh")
    testbed = Testbed(short_tmp / "testbed").up(Shape(nodes=2, gpus=2, shards=2), suite=slurm_suite)
    # A test on a busy machine needs time between submitting a job and placing it, and has no helper that beats.
    keys = {"LeaseSeconds": "300", "HeartbeatSeconds": "600", "InterimSeconds": "1"}
    for etc in (testbed.layout.etc, testbed.layout.etc_pristine):
        conf = etc / testbed.layout.gpushare_conf.name
        conf.write_text(with_keys(conf.read_text(), keys))
    yield testbed
    testbed.down(purge=True)


@pytest.fixture
def testbed(testbed_session: Testbed) -> Testbed:
    """2 nodes x 2 GPUs x 2 shards, idle and configured as new."""
    reset(testbed_session)
    return testbed_session


@pytest.fixture
def raw_shards(testbed: Testbed) -> Iterator[None]:
    """Lets tests place jobs by hand, which is the helper's privilege elsewhere; also undoes what they set themselves.

    gpushare.conf is put back here, so that the next reset finds it unchanged and need not restart slurmctld.
    """
    conf = testbed.layout.gpushare_conf
    pristine = conf.read_text()
    conf.write_text(with_keys(pristine, {"RawShards": "allow"}))
    testbed.wait_for_hook()
    yield
    conf.write_text(pristine)
