"""Doctor's checks of this machine: store, hook file, heartbeat, spool, hold, munge, NVML; each where it applies."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from slurm_gpushare.node.delivery import INCOMING, NODES, REJECTED, SUFFIX, hold_dir, seal
from slurm_gpushare.node.mps import CONTROL, control_daemons
from slurm_gpushare.node.nvml import NvmlError, is_open, open_cards
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import user_name
from slurm_gpushare.protocol.record import Mps
from slurm_gpushare.protocol.settings import PLACES_NOBODY, Config
from slurm_gpushare.site.finding import Check, Finding, check, failed, passed, warned
from slurm_gpushare.site.owner_checks import may_write
from slurm_gpushare.site.units import FOLDERS
from slurm_gpushare.store.credential import opener

_START = "Start 'gpushare backfill'."
_FENCE = "End it; ConstrainDevices=yes (cgroup.conf) and pam_slurm_adopt keep others off jobs' cards."
_MULTI_USER = "Start its daemon with -multiuser-server (Volta or newer; users' faults then reach each other)."
_OLD_S = 120.0
"""The helper writes its beat for the nodes every half minute at the least, also while nobody waits."""


@check("store")
def store(config: Config) -> Iterator[Finding]:
    """It is the helper's to write, opens, has this release's schema, and is nobody else's to read."""
    from slurm_gpushare.store.database import (
        journal_fix,
        sqlite_path,  # here: a compute node has no database library
    )
    from slurm_gpushare.store.maintenance import JOURNAL_TROUBLE, clock_doubt, mode_fix
    from slurm_gpushare.store.store import Store

    try:
        file = sqlite_path(config.store_url)
        if file is not None and _is_locked_up(file, config.slurm_user):
            found = f"{file} is not for {config.slurm_user} to write, who runs the helper"
            yield failed(found, f"Run as root: chown {config.slurm_user} {file}; chmod u+rw {file}")
            return  # its journal's fix would follow the wrong owner
        if file is not None and (fix := journal_fix(file)):
            yield failed(f"{file}: {JOURNAL_TROUBLE}", f"Run as root: {fix}", "store-journal")
            return  # to open it would say less, or hide it
        with Store(config.store_url, read_only=True) as opened:
            path, where = opened.database.path, opened.database.where
            doubt = clock_doubt(opened.database, time.time())
    except GpushareError as error:
        yield failed(error.what, error.hint)
        return
    if doubt:
        yield failed(f"{doubt}: what is too new waits, and nothing is forgotten", "Run chrony or ntpd.", "store-clock")
    if path is not None and (fix := mode_fix(path)):
        yield failed(f"{path} is open to others", f"Run: {fix}", "store-mode")
    else:
        yield passed(where)


def _is_locked_up(file: Path, user: str) -> bool:
    """Whether the helper cannot write its own store: a copy that root made, or one that was made read-only."""
    try:
        return not may_write(file.stat(), user)
    except OSError:
        return False  # not there, or not this user's to see: opening it says so


@check("outsiders")
def outsiders(config: Config) -> Iterator[Finding]:
    """On a node: nobody uses a job's card from outside of all jobs, which nobody can be charged with."""
    from slurm_gpushare.node.nvml import processes_by_card
    from slurm_gpushare.node.processes import is_outsider
    from slurm_gpushare.node.sampler import NodeState

    try:
        found = processes_by_card() if any(config.state_dir.glob("nodes/*/jobs/*")) else {}
    except NvmlError:
        return
    states = [NodeState(path) for path in config.state_dir.glob("nodes/*")]
    for gpu, pids in found.items():
        jobs = {job: uid for state in states for job, uid in state.neighbours(0, gpu).items()}
        for pid in pids:
            if jobs and is_outsider(pid, jobs):
                owner = user_name(Path(f"/proc/{pid}").stat().st_uid)
                yield warned(f"process {pid} of {owner} is on GPU {gpu} and of no job there", _FENCE)


@check("policy")
def policy(config: Config) -> Iterator[Finding]:
    """Under shadow and off nobody shares: a site may have forgotten that."""
    if config.policy == "shadow":
        yield warned(
            "Policy=shadow: jobs with a token are measured and planned for, and nobody shares",
            "'gpushare report' says what sharing would have done. Then set Policy=gpushare; no reload is needed.",
        )
    elif config.policy == "off":
        yield warned("Policy=off: nobody shares", "Set Policy=gpushare to share again; no reload is needed.")


@check("store-password")
def password(config: Config) -> Iterator[Finding]:
    """gpushare.conf is read by every user's task prolog, so no password may be in it."""
    inside = config.store_url.partition("://")[2].rpartition("@")[0]
    if ":" in inside and config.source is not None and config.source.stat().st_mode & 0o044:
        fix = "Put the URL into a file of SlurmUser's with mode 600 and write StoreUrl=file:PATH."
        yield failed(f"{config.source} holds the store's password, and others may read it", fix)


@check("readable")
def readable(config: Config) -> Iterator[Finding]:
    """Users' commands and their task prologs read gpushare.conf."""
    if config.source is not None and not config.source.stat().st_mode & 0o004:
        yield warned(
            f"users cannot read {config.source}: their commands and task prologs go by the defaults",
            f"Run: chmod 644 {config.source} (a password belongs into a file of its own, StoreUrl=file:PATH).",
        )


@check("heartbeat")
def hook_file(config: Config) -> Iterator[Finding]:
    """The hook's file is there, private, and the helper's heartbeat in it is fresh."""
    path = config.hook_file
    if not path.exists():
        yield failed(f"{path} does not exist: every token is unknown", _START, "hook-file")
        return
    if not os.access(path, os.R_OK):
        found = f"{path} is not yours to read, so it is not known if the helper is alive"
        yield warned(found, "See 'gpushare status'.")
        return
    if path.stat().st_mode & stat.S_IRWXO:
        yield failed(f"{path} is open to others", f"Run: chmod 600 {path}", "hook-file")
    from slurm_gpushare.store.hookfile import HookFile

    beat_s = HookFile(path).heartbeat_s()
    if beat_s is None:
        yield failed(f"{path} has no heartbeat", _START)
    elif (age_s := time.time() - beat_s) > config.heartbeat_s:
        hint = "Start 'gpushare backfill'; one that hangs: systemctl restart gpushare-backfill."
        yield failed(f"the helper was last alive {age_s:.0f} s ago", hint)
    else:
        yield passed(f"the helper was alive {max(age_s, 0):.0f} s ago")


@check("lease")
def lease(config: Config) -> Iterator[Finding]:
    """Which helper of the Slurm cluster is in charge. That none is the heartbeat's check says."""
    from slurm_gpushare.helper.lease import controllers, in_charge
    from slurm_gpushare.slurm.commands import connect

    slurm = connect(config.backend)
    try:
        held, hosts = in_charge(config, slurm), controllers(slurm.config())
    except (OSError, GpushareError) as why:
        yield warned(f"nobody can say which helper is in charge: {why}", "Run this as SlurmUser on a controller.")
        return
    if held is not None:
        yield passed(f"the helper on {held.host} is in charge: number {held.number}, renewed {held.age_s:.0f} s ago")
    if len(hosts) > 1 and config.store_file is not None:
        yield warned(
            f"controllers are {', '.join(hosts)}, and the store is a file: after a failover another one is used",
            "Use MariaDB: StoreUrl=mysql+pymysql://..., 'gpushare db backup' and 'restore' move what there is.",
        )


@check("spool")
def spool(config: Config) -> Iterator[Finding]:
    """Nodes can leave records, and they are taken in."""
    incoming, rejected = config.spool_dir / INCOMING, config.spool_dir / REJECTED
    if not incoming.is_dir():
        yield failed(f"{incoming} is no directory", "Make it on the shared file system: mkdir -p -m 1733.")
        return
    if not os.access(incoming, os.W_OK | os.X_OK):
        yield failed(f"{incoming} cannot be written by this user", f"Run: chmod 1733 {incoming}")
        return
    waiting, odd = [], []
    try:
        nodes = config.spool_dir / NODES
        for entry in chain(os.scandir(nodes) if nodes.is_dir() else (), os.scandir(incoming)):
            if entry.is_dir(follow_symlinks=False):
                odd.append(entry.name)
            elif entry.name.endswith(SUFFIX):
                waiting.append(entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        waiting = []  # by design only SlurmUser may list it
    if odd:
        found = f"{len(odd)} directories in {incoming}, the first is {odd[0][:60]!a}"
        fix = "The helper cannot remove them: see who owns them, then remove them as root."
        yield warned(found, fix, "spool-stuck")
    lag_s = time.time() - min(waiting) if waiting else 0.0
    if lag_s > max(10 * config.tick_s, config.heartbeat_s):
        yield warned(f"{len(waiting)} records wait, the oldest {lag_s:.0f} s", _START)
    else:
        yield passed(f"{config.spool_dir}")
    if rejected.is_dir() and os.access(rejected, os.R_OK) and (bad := len(os.listdir(rejected))):
        yield warned(f"{bad} files in {rejected}", "Each has its reason beside it.", "spool-rejected")


@check("hold-board")
def hold_board(config: Config) -> Iterator[Finding]:
    """On nodes and controller: what the helper tells the nodes is there, only SlurmUser's, and fresh."""
    if config.epilog_hold_s == 0 or config.policy in PLACES_NOBODY:
        return
    board = hold_dir(config.spool_dir)
    try:
        about = board.lstat()
        words = (board / "helper").read_text(encoding="ascii", errors="replace").split()
    except OSError as why:
        yield warned(f"{why.filename}: {why.strerror}: no card is held", _START)
        return
    ours = about.st_uid == 0 or config.slurm_user in {str(about.st_uid), user_name(about.st_uid)}
    if not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022 or not ours:
        found = f"{board} is not {config.slurm_user}'s alone: nodes do not believe what is in it"
        yield failed(found, f"Run: chown {config.slurm_user} {board}; chmod 755 {board}")
        return
    beat_s, until_s = (int(word) / 1000.0 if word.isdecimal() else 0.0 for word in (*words, "", "")[:2])
    now_s = time.time()
    if now_s - beat_s > _OLD_S:
        since = time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(beat_s)) if beat_s else "since it was stopped"
        yield warned(
            f"{board / 'helper'}: the helper has not written {since}: no card is held",
            "Is 'gpushare backfill' running? Is SpoolDir the same file system here as there, and not stale?",
        )
        return
    yield passed("somebody waits for a card" if until_s > now_s else "nobody waits for a card now")


@check("munge", "credentials can be made and read")
def munge(config: Config) -> Iterator[Finding]:
    """Records prove their author by munge: by the munged that nodes and helper ask."""
    try:
        opener(config.munge_socket)(seal("doctor", config.munge_socket).encode())
    except GpushareError as why:
        hint = "Start munged, or set MungeSocket to its socket."
        yield failed(f"no credential can be made and read: {why.what}", hint)


@check("nvml")
def nvml(_: Config) -> Iterator[Finding]:
    """On a machine with GPUs: NVML answers, and its cards admit two jobs, under MPS those of two users."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as why:
        if os.path.exists("/dev/nvidiactl"):
            yield failed(f"NVML does not start: {why}", "Check the NVIDIA driver: nvidia-smi.")
        return  # no GPU here: a controller
    try:
        cards, daemon = open_cards(range(pynvml.nvmlDeviceGetCount())), bool(control_daemons())
        busy = {index: (card.read(everything=False).util_pct or 0.0) > 0.0 for index, card in cards.items()}
        if exclusive := [str(index) for index, card in cards.items() if not is_open(card.mode, daemon)]:
            found = f"GPU {exclusive[0]} is in an exclusive compute mode without MPS: the second job's CUDA fails"
            yield failed(found, f"Run: nvidia-smi -i {','.join(exclusive)} -c DEFAULT", "compute-mode")
        else:
            yield passed(f"{len(cards)} GPUs, all open to two jobs")
        if one_user := [str(index) for index, card in cards.items() if card.mps is Mps.ONE_USER]:
            found = f"GPU {','.join(one_user)}: MPS serves one user at a time, another's job would wait there unheard"
            yield warned(f"{found}; only jobs of one user are put together there", _MULTI_USER, "mps")
        if blind := [str(index) for index, card in cards.items() if card.blind and busy[index]]:
            found = f"GPU {','.join(blind)}: MPS hides what single jobs do: no promise is kept there by us"
            yield warned(found, "See 'gpushare card-check'; without MPS promises are kept.", "mps")
    except (NvmlError, pynvml.NVMLError) as why:
        yield failed(f"NVML fails: {why}", "Check the NVIDIA driver: nvidia-smi.")
    finally:
        pynvml.nvmlShutdown()


@check("mps-unit")
def mps_unit(config: Config) -> Iterator[Finding]:
    """On a compute node with Mps: the daemon's program and its unit are there, else no job is under MPS."""
    if config.mps == "off" or not os.path.exists("/dev/nvidiactl"):
        return
    unit = any((folder / "gpushare-mps@.service").exists() for folder in FOLDERS)
    if not unit or shutil.which(CONTROL) is None:
        missing = CONTROL if unit else "gpushare-mps@.service"
        yield failed(
            f"Mps={config.mps}, and {missing} is not on this node: no job is under MPS",
            "Copy the unit from gpushare.conf's systemd/ to /etc/systemd/system; the program comes with the driver.",
        )


LOCAL_CHECKS: tuple[Check, ...] = (
    policy, store, password, readable, hook_file, lease, spool, munge, nvml, mps_unit, hold_board, outsiders,
)  # fmt: skip
CONTROLLER_CHECKS: tuple[Check, ...] = (store, hook_file, lease)
"""Those of what only the helper and slurmctld read."""
