"""Doctor's checks of this machine: store, hook file, heartbeat, spool, munge, NVML. Each only where it applies."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slurm_gpushare.node.delivery import INCOMING, REJECTED, SUFFIX, seal
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.owner_checks import may_write
from slurm_gpushare.store.credential import opener

Check = Callable[[Config], Iterable[Finding]]


def store(config: Config) -> Iterator[Finding]:
    """It is the helper's to write, opens, has this release's schema, and is nobody else's to read."""
    from slurm_gpushare.store.database import (
        journal_fix,
        sqlite_path,  # here: a compute node has no database library
    )
    from slurm_gpushare.store.maintenance import JOURNAL_TROUBLE, mode_fix
    from slurm_gpushare.store.store import Store

    try:
        file = sqlite_path(config.store_url)
        if file is not None and _is_locked_up(file, config.slurm_user):
            found = f"{file} is not for {config.slurm_user} to write, who runs the helper"
            yield failed("store", found, f"Run as root: chown {config.slurm_user} {file}; chmod u+rw {file}")
            return  # its journal's fix would follow the wrong owner
        if file is not None and (fix := journal_fix(file)):
            yield failed("store-journal", f"{file}: {JOURNAL_TROUBLE}", f"Run as root: {fix}")
            return  # to open it would say less, or hide it
        with Store(config.store_url, read_only=True) as opened:
            path = opened.database.path
            where = opened.database.where
    except GpushareError as error:
        yield failed("store", error.what, error.hint)
        return
    if path is not None and (fix := mode_fix(path)):
        yield failed("store-mode", f"{path} is open to others", f"Run: {fix}")
    else:
        yield passed("store", where)


def _is_locked_up(file: Path, user: str) -> bool:
    """Whether the helper cannot write its own store: a copy that root made, or one that was made read-only."""
    try:
        return not may_write(file.stat(), user)
    except OSError:
        return False  # not there, or not this user's to see: opening it says so


def policy(config: Config) -> Iterator[Finding]:
    """Under shadow and off nobody shares: a site may have forgotten that."""
    if config.policy == "shadow":
        yield warned(
            "policy",
            "Policy=shadow: jobs with a token are measured and planned for, and nobody shares",
            "'gpushare report' says what sharing would have done. Then set Policy=gpushare; no reload is needed.",
        )
    elif config.policy == "off":
        yield warned("policy", "Policy=off: nobody shares", "Set Policy=gpushare to share again; no reload is needed.")


def password(config: Config) -> Iterator[Finding]:
    """gpushare.conf is read by every user's task prolog, so no password may be in it."""
    inside = config.store_url.partition("://")[2].rpartition("@")[0]
    if ":" in inside and config.source is not None and config.source.stat().st_mode & 0o044:
        yield failed(
            "store-password",
            f"{config.source} holds the store's password, and others may read it",
            "Put the URL into a file of SlurmUser's with mode 600 and write StoreUrl=file:PATH.",
        )


def readable(config: Config) -> Iterator[Finding]:
    """Users' commands and their task prologs read gpushare.conf."""
    if config.source is not None and not config.source.stat().st_mode & 0o004:
        yield warned(
            "readable",
            f"users cannot read {config.source}: their commands and task prologs go by the defaults",
            f"Run: chmod 644 {config.source} (a password belongs into a file of its own, StoreUrl=file:PATH).",
        )


def hook_file(config: Config) -> Iterator[Finding]:
    """The hook's file is there, private, and the helper's heartbeat in it is fresh."""
    path = config.hook_file
    if not path.exists():
        yield failed("hook-file", f"{path} does not exist: every token is unknown", "Start 'gpushare backfill'.")
        return
    if not os.access(path, os.R_OK):
        yield warned(
            "heartbeat",
            f"{path} is not yours to read, so it is not known if the helper is alive",
            "See 'gpushare status'.",
        )
        return
    if path.stat().st_mode & stat.S_IRWXO:
        yield failed("hook-file", f"{path} is open to others", f"Run: chmod 600 {path}")
    from slurm_gpushare.store.hookfile import HookFile

    beat_s = HookFile(path).heartbeat_s()
    if beat_s is None:
        yield failed("heartbeat", f"{path} has no heartbeat", "Start 'gpushare backfill'.")
    elif (age_s := time.time() - beat_s) > config.heartbeat_s:
        hint = "Start 'gpushare backfill'; one that hangs: systemctl restart gpushare-backfill."
        yield failed("heartbeat", f"the helper was last alive {age_s:.0f} s ago", hint)
    else:
        yield passed("heartbeat", f"the helper was alive {max(age_s, 0):.0f} s ago")


def spool(config: Config) -> Iterator[Finding]:
    """Nodes can leave records, and they are taken in."""
    incoming, rejected = config.spool_dir / INCOMING, config.spool_dir / REJECTED
    if not incoming.is_dir():
        yield failed("spool", f"{incoming} is no directory", "Make it on the shared file system: mkdir -p -m 1733.")
        return
    if not os.access(incoming, os.W_OK | os.X_OK):
        yield failed("spool", f"{incoming} cannot be written by this user", f"Run: chmod 1733 {incoming}")
        return
    waiting, odd = [], []
    try:
        for entry in os.scandir(incoming):
            if entry.is_dir(follow_symlinks=False):
                odd.append(entry.name)
            elif entry.name.endswith(SUFFIX):
                waiting.append(entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        waiting = []  # by design only SlurmUser may list it
    if odd:
        yield warned(
            "spool-stuck",
            f"{len(odd)} directories in {incoming}, the first is {odd[0][:60]!a}",
            "The helper cannot remove them: see who owns them, then remove them as root.",
        )
    lag_s = time.time() - min(waiting) if waiting else 0.0
    if lag_s > max(10 * config.tick_s, config.heartbeat_s):
        yield warned("spool", f"{len(waiting)} records wait, the oldest {lag_s:.0f} s", "Start 'gpushare backfill'.")
    else:
        yield passed("spool", f"{config.spool_dir}")
    if rejected.is_dir() and os.access(rejected, os.R_OK) and (bad := len(os.listdir(rejected))):
        yield warned("spool-rejected", f"{bad} files in {rejected}", "Each has its reason beside it.")


def munge(config: Config) -> Iterator[Finding]:
    """Records prove their author by munge: by the munged that nodes and helper ask."""
    try:
        opener(config.munge_socket)(seal("doctor", config.munge_socket).encode())
    except GpushareError as why:
        hint = "Start munged, or set MungeSocket to its socket."
        yield failed("munge", f"no credential can be made and read: {why.what}", hint)
    else:
        yield passed("munge", "credentials can be made and read")


def nvml(config: Config) -> Iterator[Finding]:
    """On a machine with GPUs: NVML answers, and its cards admit two processes."""
    del config
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as why:
        if os.path.exists("/dev/nvidiactl"):
            yield failed("nvml", f"NVML does not start: {why}", "Check the NVIDIA driver: nvidia-smi.")
        return  # no GPU here: a controller
    try:
        exclusive = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetComputeMode(handle) != pynvml.NVML_COMPUTEMODE_DEFAULT:
                exclusive.append(index)
        if exclusive:
            yield failed(
                "compute-mode",
                f"GPU {exclusive[0]} is in an exclusive compute mode: the second job's CUDA fails",
                f"Run: nvidia-smi -i {','.join(map(str, exclusive))} -c DEFAULT",
            )
        else:
            yield passed("nvml", f"{pynvml.nvmlDeviceGetCount()} GPUs, all open to two processes")
    except pynvml.NVMLError as why:
        yield failed("nvml", f"NVML fails: {why}", "Check the NVIDIA driver: nvidia-smi.")
    finally:
        pynvml.nvmlShutdown()


LOCAL_CHECKS: tuple[Check, ...] = (policy, store, password, readable, hook_file, spool, munge, nvml)
CONTROLLER_CHECKS: tuple[Check, ...] = (store, hook_file)
"""Those of what only the helper and slurmctld read."""
