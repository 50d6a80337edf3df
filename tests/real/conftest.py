"""A real Slurm for the tests of this directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_gpushare.testbed.cluster import Testbed
from slurm_gpushare.testbed.confs import with_keys
from slurm_gpushare.testbed.environment import closed_directory
from slurm_gpushare.testbed.layout import Shape
from slurm_gpushare.testbed.reset import reset


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
