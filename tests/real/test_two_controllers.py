"""Two controllers, a helper on each: one is in charge, where slurmctld acts, and it moves with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpushare_lab.testbed.backup_controller import HOST, backup_controller, pinged, resume_nodes, there
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import Site

from slurm_gpushare.helper.lease import in_charge
from slurm_gpushare.protocol.release import parse_release
from slurm_gpushare.slurm.commands import connect
from slurm_gpushare.slurm.nodes import Node


@pytest.fixture
def site(testbed: Testbed) -> Site:
    return Site(testbed)


def own_settings(site: Site, name: str) -> Path:
    """gpushare.conf for another controller: its own StateDir and hook file, the cluster's store and spool."""
    directory = site.testbed.layout.gpushare / name
    directory.mkdir()
    owner = site.testbed.layout.gpushare.stat()
    os.chown(directory, owner.st_uid, owner.st_gid)
    path = site.testbed.layout.etc / f"gpushare.{name}.conf"
    own = f"StateDir={directory}\nHookFile={directory}/hook.sqlite\n"
    assert site.config.source is not None
    kept = [
        line for line in site.config.source.read_text().splitlines() if not line.startswith(("StateDir", "HookFile"))
    ]
    path.write_text("\n".join(kept) + "\n" + own)
    return path


@contextmanager
def second_helper(site: Site, name: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The helper of the backup controller's machine."""
    command = [sys.executable, "-m", "slurm_gpushare", "backfill"]
    settings = own_settings(site, name)
    argv, env = site.testbed.command(command, user=site.testbed.slurm_user)
    extra = {"GPUSHARE_CONF": str(settings), "GPUSHARE_LAST_GOOD": str(settings.with_suffix(".good"))}
    with log.open("ab") as file:
        process = subprocess.Popen(there(argv), env=env | extra, stderr=file, stdout=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def charge(site: Site) -> str:
    with site.environment():
        held = in_charge(site.config, connect())
    return held.host if held else ""


def nodes(site: Site) -> list[Node]:
    with site.environment():
        return connect().nodes()


def place_one(site: Site, log: Path) -> None:
    """The second helper gives a job its card."""
    site.testbed.reconfigure()  # a backup of 24.11 may not know the shards of nodes before: docs/reliability.md
    resume_nodes(site.testbed)
    assert wait_until(lambda: all(node.usable for node in nodes(site)), 60), site.picture()
    job = site.submit(0)
    site.wait_running([job])
    assert wait_until(lambda: f"event=place job={job} outcome=done" in log.read_text(), 60), log.read_text()


def test_the_helper_in_charge_is_where_slurmctld_acts_also_after_a_failover_and_back(site: Site) -> None:
    log = site.testbed.layout.log / "second-helper.log"
    # The first helper was there before the backup controller.
    with site.process(), backup_controller(site.testbed), second_helper(site, "second", log):
        assert wait_until(lambda: "event=standby" in log.read_text(), 60)
        first = charge(site)
        assert first != HOST
        primary = next(host for host in pinged(site.testbed) if host != HOST)

        site.testbed.kill("slurmctld")
        assert wait_until(lambda: charge(site) == HOST, 90), log.read_text()
        if parse_release(site.testbed.release).can("keeps_whole_gpus_apart"):  # 22.05 loses all shards at a failover
            place_one(site, log)

        site.testbed.daemons()["slurmctld"].start()
        assert wait_until(lambda: pinged(site.testbed).get(primary, False), 60)
        assert wait_until(lambda: charge(site) == first, 90), log.read_text()
