"""Bring a running testbed back to the state after `up`: between two tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from gpushare_lab.testbed.configuration import version
from gpushare_lab.testbed.directories import (
    clean_emulation,
    give_slurmdbd_its_file,
    make_gpushare_directories,
    make_homes,
)
from gpushare_lab.testbed.processes import stop_pids, wait_until
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare.protocol.errors import GpushareError


def reset(testbed: Testbed) -> None:
    """No jobs, idle GPUs, every daemon alive, the configuration, our own files and users' homes as `up` made them.

    Accounting keeps what it has, and job ids go on.
    """
    for name, pid in testbed.running().items():
        if pid is None:
            testbed.restart(name)
    _cancel_everything(testbed)
    stop_pids(testbed.strays(), grace_s=0.2)  # samplers, whose records go anyway, and what a test left behind
    readers = _restore_configuration(testbed)
    _empty(testbed.layout.gpushare)
    _empty(testbed.layout.home)
    make_homes(testbed.layout)
    make_gpushare_directories(testbed.layout, testbed.state)
    clean_emulation(testbed.layout, testbed.shape)
    for daemon in readers:
        testbed.restart(daemon)
    _delete_reservations(testbed)
    idle_nodes(testbed)


def _cancel_everything(testbed: Testbed) -> None:
    def empty() -> bool:
        return not testbed.run(["squeue", "-h", "-a", "-o", "%i"]).stdout.strip()

    if empty():
        return
    for state in ("PENDING", "RUNNING", "SUSPENDED"):  # pending first, or they would start as others end
        testbed.run(["scancel", "--quiet", f"--state={state}"], check=False)
    if wait_until(empty, 5):
        return
    testbed.run(["scancel", "--quiet", "--signal=KILL", "--full", "--state=RUNNING"], check=False)
    if not wait_until(empty, 60):
        raise GpushareError(f"testbed: jobs that do not end: {testbed.run(['squeue', '-h', '-a']).stdout.strip()}")


def _restore_configuration(testbed: Testbed) -> list[str]:
    """Put back what differs; the daemons that must read it again: slurmctld, but not for gpushare.conf alone, and where
    gres.conf differed the slurmds, which say how many shards they have."""
    etc, pristine = testbed.layout.etc, testbed.layout.etc_pristine
    now, before = _contents(etc), _contents(pristine)
    changed = {name for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
    if changed:
        _empty(etc)
        shutil.copytree(pristine, etc, dirs_exist_ok=True)
        give_slurmdbd_its_file(testbed.layout, testbed.state)
    if changed == {testbed.layout.gpushare_conf.name}:
        testbed.wait_for_hook()
        return []
    slurmds = [f"slurmd-{name}" for name in testbed.shape.node_names] if "gres.conf" in changed else []
    return ["slurmctld", *slurmds] if changed else []


def _contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mode, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _delete_reservations(testbed: Testbed) -> None:
    for line in testbed.run(["scontrol", "show", "reservations", "-o"]).stdout.splitlines():
        if line.startswith("ReservationName="):
            testbed.run(["scontrol", "delete", line.split()[0]])


def idle_nodes(testbed: Testbed) -> None:
    """Wait until every node is idle, and knows its shards."""

    def states() -> dict[str, str]:
        lines = testbed.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout.splitlines()
        return dict(line.split(None, 1) for line in lines)

    if set(states().values()) != {"idle"}:
        testbed.run(
            ["scontrol", "update", f"NodeName={','.join(testbed.shape.node_names)}", "State=RESUME"], check=False
        )
    if not wait_until(lambda: set(states().values()) == {"idle"}, 60):
        raise GpushareError(f"testbed: nodes that do not become idle: {states()}")
    if version(testbed.release) < (23, 11) and _lost_shards(testbed):
        # 22.05 forgets shards when slurmctld restarts while they are in use; with no job left a restart finds them.
        testbed.restart("slurmctld")
        if not wait_until(lambda: set(states().values()) == {"idle"} and not _lost_shards(testbed), 60):
            raise GpushareError("testbed: slurmctld lost shards and does not find them again")


_NO_SHARDS = re.compile(r"shard:(v100_\d+:)?0\b")


def _lost_shards(testbed: Testbed) -> bool:
    return bool(_NO_SHARDS.search(testbed.run(["sinfo", "-h", "-N", "-o", "%G"]).stdout))
