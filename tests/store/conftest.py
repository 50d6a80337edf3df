"""A private munged and a private MariaDB, both stopped by pid when the tests are over."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpushare_lab.testbed import database
from gpushare_lab.testbed.layout import Layout
from sqlalchemy import create_engine

# The store's unit tests are run again here, on the real thing.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

_numbers = itertools.count()


@contextmanager
def daemon(argv: list[str], ready: Callable[[], bool]) -> Iterator[None]:
    """Run a daemon in the foreground from when it answers until the end of the block."""
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready():
                assert process.poll() is None, f"{argv[0]} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{argv[0]} does not answer"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """Unix sockets want short paths."""
    with tempfile.TemporaryDirectory(prefix="gs-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def munge_socket(short_dir: Path) -> Iterator[Path]:
    """The socket of a munged of our own, with a key of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a munged that vouches for root")
    key, sock = short_dir / "munge.key", short_dir / "munge.sock"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    argv = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}", "--num-threads=2",
        *(f"--{name}-file={short_dir}/munge.{name}" for name in ("pid", "log", "seed")),
    ]  # fmt: skip

    def answers() -> bool:
        return subprocess.run(["munge", f"--socket={sock}", "--no-input"], capture_output=True).returncode == 0

    with daemon(argv, answers):
        yield sock


@pytest.fixture(scope="session")
def mariadb(short_dir: Path) -> Iterator[Path]:
    """The socket of a MariaDB of our own."""
    layout = Layout(short_dir / "db")
    for folder in (layout.root, layout.run):
        folder.mkdir(exist_ok=True)
    database.prepare(layout)
    with daemon(database.server_argv(layout), lambda: database.answers(layout)):
        yield layout.mariadb_socket


@pytest.fixture
def mariadb_url(mariadb: Path) -> Iterator[str]:
    """An empty database on it."""
    name = f"store{next(_numbers)}"
    engine = create_engine(f"mysql+pymysql://root@localhost/mysql?unix_socket={mariadb}")
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield f"mysql+pymysql://root@localhost/{name}?unix_socket={mariadb}"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}")
    engine.dispose()
