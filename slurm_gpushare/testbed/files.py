"""The files and directories of a testbed, before any daemon starts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.testbed import confs
from slurm_gpushare.testbed.emulator import create_node
from slurm_gpushare.testbed.environment import daemon_env, make_home
from slurm_gpushare.testbed.layout import Layout, Shape, State
from slurm_gpushare.testbed.scripts import write_scripts


def make_directories(layout: Layout, shape: Shape) -> None:
    """All directories, device files, cards and the munge key."""
    for path in (layout.etc, layout.log, layout.spool / "slurmctld", layout.bin, layout.lib):
        path.mkdir(parents=True)
    layout.home.mkdir()
    layout.home.chmod(0o1777)
    make_homes(layout)
    make_gpushare_directories(layout)
    for node in shape.node_names:
        (layout.spool / node).mkdir()
        (layout.dev / node).mkdir(parents=True)
        for index in range(shape.gpus):
            _null_device(layout.dev / node / f"nvidia{index}")
    clean_emulation(layout, shape)
    key = layout.etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def make_homes(layout: Layout) -> None:
    for user in confs.TEST_USERS:
        make_home(layout, user)


def make_gpushare_directories(layout: Layout) -> None:
    """The places that gpushare.conf names."""
    for name in ("state", "spool/incoming"):
        (layout.gpushare / name).mkdir(parents=True, exist_ok=True)
    (layout.gpushare / "spool" / "incoming").chmod(0o1777)  # users' records come in here too


def clean_emulation(layout: Layout, shape: Shape) -> None:
    """Idle GPUs, as new; in place, since a sampler may have a card mapped."""
    for node in shape.node_names:
        create_node(layout.emu, node, shape.gpus)


def write_configuration(layout: Layout, state: State) -> None:
    """etc/, and the copy of it that a reset goes back to."""
    write_scripts(layout, daemon_env(layout))
    has_cli_filter = (layout.etc / "cli_filter.lua").exists()
    hostname = socket.gethostname().partition(".")[0]
    layout.slurm_conf.write_text(confs.slurm_conf(layout, state, hostname, has_cli_filter))
    (layout.etc / "gres.conf").write_text(confs.gres_conf(layout, state))
    (layout.etc / "cgroup.conf").write_text(confs.cgroup_conf(state.release))
    layout.gpushare_conf.write_text(confs.gpushare_conf(layout, state))
    if state.accounting:
        slurmdbd = layout.etc / "slurmdbd.conf"
        slurmdbd.touch(mode=0o600)  # slurmdbd refuses one that others may read
        slurmdbd.write_text(confs.slurmdbd_conf(layout, state))
    shutil.copytree(layout.etc, layout.etc_pristine)


def _null_device(path: Path) -> None:
    """A character device that Slurm takes for a GPU's."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError as why:
        raise GpushareError(
            f"testbed: {path}: this container may not make device files", "Start it with the capability MKNOD."
        ) from why
