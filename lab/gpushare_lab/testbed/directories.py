"""The files and directories of a testbed, before any daemon starts."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from gpushare_lab.emulator import CARDS, create_node
from gpushare_lab.testbed import configuration
from gpushare_lab.testbed.environment import daemon_env, make_home
from gpushare_lab.testbed.layout import Layout, Shape, State
from gpushare_lab.testbed.scripts import write_munge_commands, write_scripts
from slurm_gpushare.node.delivery import INCOMING, INCOMING_MODE
from slurm_gpushare.protocol.errors import GpushareError


def make_directories(layout: Layout, shape: Shape) -> None:
    """All directories, device files, cards and the munge key."""
    for path in (layout.etc, layout.log, layout.spool / "slurmctld", layout.bin, layout.lib):
        path.mkdir(parents=True)
    layout.home.mkdir()
    layout.home.chmod(0o1777)
    make_homes(layout)
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
    for user in configuration.TEST_USERS:
        make_home(layout, user)


def give_to_slurm_user(layout: Layout, state: State) -> None:
    """What slurmctld, slurmdbd and the helper write is SlurmUser's, since they run as SlurmUser."""
    layout.slurm_run.mkdir()
    logs = [layout.log / name for name in ("slurmctld.log", "slurmdbd.log")]
    for log in logs:
        log.touch(mode=0o640)
    for path in (layout.slurm_run, layout.spool / "slurmctld", *logs):
        shutil.chown(path, state.slurm_user, state.slurm_user)
    make_gpushare_directories(layout, state)


def make_gpushare_directories(layout: Layout, state: State) -> None:
    """The places that gpushare.conf names, with the modes of docs/admin-guide.md."""
    spool = layout.gpushare / "spool"
    for path, mode in ((layout.gpushare, 0o711), (layout.gpushare / "state", 0o711), (spool, 0o711),
                       (spool / INCOMING, INCOMING_MODE)):  # fmt: skip
        path.mkdir(exist_ok=True)
        path.chmod(mode)
        shutil.chown(path, state.slurm_user, state.slurm_user)


def give_slurmdbd_its_file(layout: Layout, state: State) -> None:
    """slurmdbd refuses a configuration that is not SlurmUser's own."""
    for etc in (layout.etc, layout.etc_pristine):
        if (path := etc / "slurmdbd.conf").exists():
            shutil.chown(path, state.slurm_user, state.slurm_user)


def clean_emulation(layout: Layout, shape: Shape) -> None:
    """Make all GPUs idle. Their files are changed in place, because a sampler may have mapped one."""
    for node in shape.node_names:
        card = CARDS[shape.model_of(node)]
        create_node(layout.emu, node, shape.gpus, model=card.name, mem_total_mib=card.mem_total_mib)


def write_configuration(layout: Layout, state: State) -> None:
    """etc/, and the copy of it that a reset goes back to."""
    write_munge_commands(layout)
    if not state.plain:
        write_scripts(layout, daemon_env(layout), state.shape)
        layout.gpushare_conf.write_text(configuration.gpushare_conf(layout, state))
    has_cli_filter = (layout.etc / "cli_filter.lua").exists()
    hostname = socket.gethostname().partition(".")[0]
    layout.slurm_conf.write_text(configuration.slurm_conf(layout, state, hostname, has_cli_filter))
    (layout.etc / "gres.conf").write_text(configuration.gres_conf(layout, state))
    (layout.etc / "cgroup.conf").write_text(configuration.cgroup_conf(state.release))
    if state.accounting:
        slurmdbd = layout.etc / "slurmdbd.conf"
        slurmdbd.touch(mode=0o600)  # slurmdbd refuses one that others may read
        slurmdbd.write_text(configuration.slurmdbd_conf(layout, state))
    shutil.copytree(layout.etc, layout.etc_pristine)
    give_slurmdbd_its_file(layout, state)


def _null_device(path: Path) -> None:
    """A character device that Slurm takes for a GPU's."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError as why:
        raise GpushareError(
            f"testbed: {path}: this container may not make device files", "Start it with the capability MKNOD."
        ) from why
