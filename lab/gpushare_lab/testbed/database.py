"""A private MariaDB that only its own Unix socket reaches."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from gpushare_lab.testbed.environment import daemon_env
from gpushare_lab.testbed.layout import Layout
from slurm_gpushare.protocol.errors import GpushareError

# Set-up and server must agree on the sizes; small files make the set-up quick (0.7 s instead of 4).
# Nothing here needs to survive a power cut, so nothing waits for the disk; what was committed survives a kill -9.
_SIZES = ("--innodb-data-file-path=ibdata1:3M:autoextend", "--innodb-log-file-size=4M", "--innodb-undo-tablespaces=0")
_OPTIONS = (
    *_SIZES,
    "--skip-networking",
    "--skip-log-bin",
    "--skip-name-resolve",
    "--skip-external-locking",
    "--innodb-flush-method=nosync",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-doublewrite=0",
    "--innodb-buffer-pool-size=32M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-fast-shutdown=2",
    "--key-buffer-size=1M",
    "--aria-pagecache-buffer-size=8M",
    "--performance-schema=OFF",
)


def data_dir(layout: Layout) -> Path:
    return layout.root / "mariadb"


def server_argv(layout: Layout) -> list[str]:
    return [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={data_dir(layout)}",
        f"--socket={layout.mariadb_socket}",
        f"--pid-file={layout.run}/mariadb.own.pid",
        f"--tmpdir={data_dir(layout)}",
        *_OPTIONS,
    ]


def answers(layout: Layout) -> bool:
    """Whether the server greets on its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        try:
            client.connect(str(layout.mariadb_socket))
            return len(client.recv(5)) == 5
        except OSError:
            return False


def prepare(layout: Layout, owner: str = "root") -> None:
    """Make the data directory, and an account of `owner` that may do anything and needs no password on the socket."""
    data_dir(layout).mkdir(mode=0o700, exist_ok=True)
    made = subprocess.run(
        [
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            f"--datadir={data_dir(layout)}",
            # A server that starts removes every temporary table from its tmpdir, also another's, who then fails.
            f"--tmpdir={data_dir(layout)}",
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={owner}",
            "--skip-test-db",
            "--skip-name-resolve",
            *_SIZES,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **daemon_env(layout)},  # marked, so that it is found if we are killed meanwhile
    )
    if made.returncode:
        raise GpushareError(f"mariadb-install-db: {(made.stderr or made.stdout).strip()[-400:]}")
