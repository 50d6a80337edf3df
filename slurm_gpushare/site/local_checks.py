"""Doctor's checks of this machine: store, hook file, heartbeat, spool, munge, NVML. Each only where it applies."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator

from slurm_gpushare.config import Config
from slurm_gpushare.errors import GpushareError
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.store import Store
from slurm_gpushare.telemetry.spool import INCOMING, SUFFIX

Check = Callable[[Config], Iterable[Finding]]


def store(config: Config) -> Iterator[Finding]:
    """It opens, has this release's schema, and is nobody else's to read."""
    try:
        with Store(config.store_url, read_only=True) as opened:
            path = opened.database.path
            where = opened.database.where
    except GpushareError as error:
        yield failed("store", error.what, error.hint)
        return
    if path is not None and path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield failed("store-mode", f"{path} is open to others", f"Run: chmod 600 {path}")
    else:
        yield passed("store", where)


def hook_file(config: Config) -> Iterator[Finding]:
    """The hook's file is there, private, and the helper's heartbeat in it is fresh."""
    path = config.hook_file
    if not path.exists():
        yield failed("hook-file", f"{path} does not exist: every token is unknown", "Start 'gpushare backfill'.")
        return
    if path.stat().st_mode & stat.S_IRWXO:
        yield failed("hook-file", f"{path} is open to others", f"Run: chmod 600 {path}")
    beat_s = HookFile(path).heartbeat_s()
    if beat_s is None:
        yield failed("heartbeat", f"{path} has no heartbeat", "Start 'gpushare backfill'.")
    elif (age_s := time.time() - beat_s) > config.heartbeat_s:
        yield failed("heartbeat", f"the helper was last alive {age_s:.0f} s ago", "Start 'gpushare backfill'.")
    else:
        yield passed("heartbeat", f"the helper was alive {max(age_s, 0):.0f} s ago")


def spool(config: Config) -> Iterator[Finding]:
    """Nodes can leave records, and they are taken in."""
    incoming, rejected = config.spool_dir / INCOMING, config.spool_dir / "rejected"
    if not incoming.is_dir():
        yield failed("spool", f"{incoming} is no directory", "Make it on the shared file system: mkdir -p -m 1733.")
        return
    if not os.access(incoming, os.W_OK | os.X_OK):
        yield failed("spool", f"{incoming} cannot be written by this user", f"Run: chmod 1733 {incoming}")
        return
    try:
        waiting = [entry.stat().st_mtime for entry in os.scandir(incoming) if entry.name.endswith(SUFFIX)]
    except PermissionError:
        waiting = []  # by design only SlurmUser may list it
    lag_s = time.time() - min(waiting) if waiting else 0.0
    if lag_s > max(10 * config.tick_s, config.heartbeat_s):
        yield warned("spool", f"{len(waiting)} records wait, the oldest {lag_s:.0f} s", "Start 'gpushare backfill'.")
    else:
        yield passed("spool", f"{config.spool_dir}")
    if rejected.is_dir() and os.access(rejected, os.R_OK) and (bad := len(os.listdir(rejected))):
        yield warned("spool-rejected", f"{bad} files in {rejected}", "Each has its reason beside it.")


def munge(config: Config) -> Iterator[Finding]:
    """Records prove their author by munge."""
    del config
    try:
        sealed = subprocess.run(["munge", "-n"], capture_output=True, timeout=10, check=True)
        subprocess.run(["unmunge"], input=sealed.stdout, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as why:
        yield failed("munge", f"no credential can be made and read: {type(why).__name__}", "Start munged.")
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


LOCAL_CHECKS: tuple[Check, ...] = (store, hook_file, spool, munge, nvml)
