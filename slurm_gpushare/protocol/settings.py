"""gpushare.conf: the site's settings, in Slurm's own ``Key=Value`` style.

`KEYS` is the single list of what may be set: the parser, the documentation and the man page
read it. The Lua hook reads the same file and takes the few keys it needs.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_gpushare.protocol.errors import ConfigError

DEFAULT_PATH = Path("/etc/slurm/gpushare.conf")


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """``GPUSHARE_CONF``, else gpushare.conf beside the slurm.conf in use."""
    if explicit := environ.get("GPUSHARE_CONF"):
        return Path(explicit)
    if slurm_conf := environ.get("SLURM_CONF"):
        return Path(slurm_conf).with_name("gpushare.conf")
    return DEFAULT_PATH


def _text(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


def _path(value: str) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def _optional_path(value: str) -> Path | None:
    return _path(value) if value else None


_BLANK = " \t\r"
"""What separates words; the hook and the prolog, which read the same file, know no other."""


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name for part in value.split(",") if (name := part.strip(_BLANK)))
    if any(blank in name for name in names for blank in _BLANK):
        raise ValueError("must be names with commas between them")
    return names


def _models(value: str) -> tuple[str, ...]:
    names = _names(_text(value))
    if not names or len(set(names)) < len(names):
        raise ValueError("must be names with commas between them, each once")
    return names


def _whole(value: str) -> bool:
    return value.isascii() and value.isdecimal()


def _yes_no(value: str) -> bool:
    lowered = value.lower()
    if lowered not in {"yes", "no"}:
        raise ValueError("must be yes or no")
    return lowered == "yes"


class _Choice:
    """One of a few words; the documentation lists them."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def __call__(self, value: str) -> str:
        lowered = value.lower()
        if lowered not in self.allowed:
            raise ValueError(f"must be one of {', '.join(self.allowed)}")
        return lowered


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not _whole(value) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        number = float(value) if _NUMBER.fullmatch(value) else float("nan")
        if not low <= number <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return number

    return parse


def _per_partition(value: str) -> Mapping[str, int]:
    """``gpu:8,debug:4`` -> {"gpu": 8, "debug": 4}."""
    result: dict[str, int] = {}
    for item in _names(value):
        name, _, number = item.rpartition(":")
        if not name or not _whole(number):
            raise ValueError("must be PARTITION:NUMBER[,PARTITION:NUMBER...]")
        result[name] = int(number)
    return result


@dataclass(frozen=True)
class Key:
    """One setting: how it is written, what it becomes, what it means."""

    name: str
    attribute: str
    parse: Callable[[str], Any]
    default: str
    help: str

    @property
    def values(self) -> tuple[str, ...]:
        """The words that it may be set to; none where it takes any text or number."""
        if self.parse is _yes_no:
            return ("yes", "no")
        return self.parse.allowed if isinstance(self.parse, _Choice) else ()


POLICIES = ("gpushare", "paper", "fcfs", "random", "shadow", "off")
"""Who shares with whom: the helper's policies."""
PLACES_NOBODY = frozenset({"shadow", "off"})
"""Policies under which no job is given a card."""

KEYS: tuple[Key, ...] = (
    Key("Partitions", "partitions", _names, "", "Partitions whose jobs may share GPUs. Empty: none."),
    Key("ShardsPerGpu", "shards_per_gpu", _integer(2, 64), "2",
        "Shards that gres.conf gives each GPU. Two jobs share a card whatever the number; all shards of a GPU are the whole card."),
    Key("GpuModel", "gpu_models", _models, "v100",
        "The site's name of the shared GPUs: a node feature, and the start of each index's GRES type (v100_0, v100_1, ...). Several models, separated by commas, share each for itself, with its own knowledge."),
    Key("GpusPerNode", "gpus_per_node", _integer(1, 64), "4", "GPUs on a shared node."),
    Key("SlurmVersion", "slurm_version", str, "",
        "Release of slurmctld, as sinfo -V prints it (22.05.8). The hook needs it, since Lua cannot ask; configure writes it."),
    Key("DefCpuPerGpu", "def_cpu_per_gpu", _per_partition, "",
        "The partitions' DefCpuPerGPU (gpu:8,debug:4). Shards do not inherit it, so the hook asks for those CPUs itself."),
    Key("DefMemPerGpu", "def_mem_per_gpu_mib", _per_partition, "",
        "The partitions' DefMemPerGPU in MiB (gpu:16000). Shards do not inherit it either."),
    Key("StoreUrl", "store_url", _text, "sqlite:////var/lib/gpushare/store.sqlite",
        "SQLAlchemy URL of the store: an SQLite file on the controller, or mysql+pymysql://... where controllers are several. file:PATH: the URL, with its password, is in that file."),
    Key("HookFile", "hook_file", _path, "/var/lib/gpushare/hook.sqlite",
        "The small SQLite file that the submit hook reads. The helper keeps it up to date."),
    Key("SpoolDir", "spool_dir", _path, "/var/spool/gpushare",
        "Where compute nodes leave telemetry records for the helper: on a file system that nodes and controller share."),
    Key("RecordsTo", "records_to", _Choice("spool", "store"), "spool",
        "Where nodes leave records: in SpoolDir, or straight in the database of StoreUrl where no file system is shared."),
    Key("MungeSocket", "munge_socket", _optional_path, "",
        "Socket of munged, by whose credentials records prove who made them. Empty: munge's own default."),
    Key("SlurmUser", "slurm_user", _text, "slurm",
        "SlurmUser of slurm.conf (or its uid), who runs the helper. Nodes hold cards for nobody else."),
    Key("NodeUsers", "node_users", _names, "root",
        "Users (or uids) whose records speak for a node: root, and SlurmdUser where it is another."),
    Key("StateDir", "state_dir", _path, "/run/gpushare",
        "Local directory of the helper's lock and of each node's samplers."),
    Key("PublicDir", "public_dir", _path, "/var/spool/gpushare/public",
        "Where the helper tells users about their jobs: a directory that only SlurmUser writes and everybody reads, also on login nodes."),
    Key("DcgmJobMappingDir", "dcgm_job_mapping_dir", _optional_path, "",
        "Directory of DCGM's job mapping files (DCGM_HPC_JOB_MAPPING_DIR). Empty: not written."),
    Key("SampleSeconds", "sample_s", _number(0.05, 60), "0.5", "Time between two telemetry samples."),
    Key("InterimSeconds", "interim_s", _number(1, 3600), "30", "Time between two interim records of a running job."),
    Key("ProbeSeconds", "probe_s", _number(1, 604800), "3600",
        "Longest time that a profile covers if the job does not tell the end of its first epoch."),
    Key("Backend", "backend", _Choice("commands", "auto", "pyslurm"), "commands",
        "How the helper reads the queue: Slurm's commands, or pyslurm (GPL-2.0, an extra, Slurm 25.11 only). auto takes pyslurm where it fits."),
    Key("LeaseSeconds", "lease_s", _integer(1, 600), "30",
        "Longest time that a submitted job waits for the helper before Slurm may start it as it was asked for."),
    Key("TickSeconds", "tick_s", _number(0.2, 600), "5", "Time between two looks of the helper at the queue."),
    Key("EpilogHold", "epilog_hold_s", _number(0, 2), "1",
        "Longest time that an epilog keeps a card which has just become empty, so that the helper decides who gets it. 0: none."),
    Key("KeepDays", "keep_days", _integer(7, 36500), "365",
        "How long the store remembers runs, decisions and observations, and tokens that nobody uses; once a day the helper forgets what is older."),
    Key("HeartbeatSeconds", "heartbeat_s", _integer(5, 3600), "60",
        "Age of the helper's heartbeat from which the hook and the watchdog take it for dead, and users' commands what it published for old."),
    Key("Policy", "policy", _Choice(*POLICIES), "gpushare",
        "Who shares with whom. gpushare: who loses least by it; paper: clusters that complement each other; fcfs: the first that fits; random: any that fits; shadow: nobody, but everything is planned and recorded as with gpushare, and the report says what it would have done; off: nobody."),
    Key("Objective", "objective", _Choice("completion", "saving"), "completion",
        "What the policy gpushare aims at: least total completion time, or most GPU time saved (jobs then share also while GPUs are idle)."),
    Key("ShareAcross", "share_across", _Choice("any", "account", "user"), "any",
        "Whose jobs may sit beside each other: anybody's who opted in, one account's, or one user's."),
    Key("ShareGangs", "share_gangs", _yes_no, "no",
        "Whether two jobs that each ask for all GPUs of a node may share that node. Needs Slurm 23.11.5 or newer, and MULTIPLE_SHARING_GRES_PJ and ONE_TASK_PER_SHARING_GRES in SelectTypeParameters; without them such jobs run as written."),
    Key("ResidentBudget", "resident_budget_pct", _number(0, 1000), "25",
        "Most that all guests together may lengthen the whole run of the job that had the GPU first, in per cent."),
    Key("GuestCap", "guest_cap_pct", _number(0, 1000), "50",
        "Most that a job is slowed which joins another on its GPU, in per cent."),
    Key("MemoryHeadroom", "memory_headroom_pct", _number(0, 50), "5",
        "GPU memory that must stay free beside both jobs' peaks, in per cent of the card."),
    Key("ExtendTimeLimit", "extend_time_limit", _yes_no, "yes",
        "Whether the helper adds what sharing cost a job, as measured, to its time limit: nobody dies of sharing."),
    Key("FrameworkMemory", "framework_memory", _Choice("grow", "leave"), "grow",
        "Whether jobs with a token get TF_FORCE_GPU_ALLOW_GROWTH=true and XLA_PYTHON_CLIENT_PREALLOCATE=false, unless they set these themselves."),
    Key("OnSlowdown", "on_slowdown", _Choice("pause", "requeue", "report"), "pause",
        "What happens when a resident's promise is about to be broken: pause who came last, requeue it where its owner has agreed, or only report it."),
    Key("PauseMost", "pause_most_pct", _number(0, 100), "25",
        "Most that a job is paused in all, in per cent of its time limit, or of its expected run where it has none."),
    Key("RawShards", "raw_shards", _Choice("deny", "allow"), "deny",
        "Whether users may ask for shards by hand on the shared partitions. deny: such a job is refused with one line; allow: Slurm decides."),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings in force; one attribute for each entry of `KEYS`."""

    partitions: tuple[str, ...]
    shards_per_gpu: int
    gpu_models: tuple[str, ...]
    gpus_per_node: int
    slurm_version: str
    def_cpu_per_gpu: Mapping[str, int]
    def_mem_per_gpu_mib: Mapping[str, int]
    store_url: str
    hook_file: Path
    spool_dir: Path
    records_to: str
    munge_socket: Path | None
    slurm_user: str
    node_users: tuple[str, ...]
    state_dir: Path
    public_dir: Path
    dcgm_job_mapping_dir: Path | None
    sample_s: float
    interim_s: float
    probe_s: float
    backend: str
    lease_s: int
    tick_s: float
    epilog_hold_s: float
    keep_days: int
    heartbeat_s: int
    policy: str
    objective: str
    share_across: str
    share_gangs: bool
    resident_budget_pct: float
    guest_cap_pct: float
    memory_headroom_pct: float
    extend_time_limit: bool
    framework_memory: str
    on_slowdown: str
    pause_most_pct: float
    raw_shards: str
    source: Path | None = field(default=None, compare=False)

    @property
    def store_file(self) -> Path | None:
        """The store's file, where StoreUrl itself names one."""
        kind, _, path = self.store_url.partition("://")
        return Path("/" + path.lstrip("/")) if kind == "sqlite" and path.startswith("//") else None

    @property
    def url_file(self) -> Path | None:
        """The file that holds the store's URL, where StoreUrl names one."""
        return Path(self.store_url.removeprefix("file:")) if self.store_url.startswith("file:/") else None

    @property
    def promises(self) -> SitePromises:
        return SitePromises(self.resident_budget_pct, self.guest_cap_pct)


_BY_NAME = {key.name.lower(): key for key in KEYS}


def parse_config(text: str, source: Path | None = None) -> Config:
    """Settings from the text of a gpushare.conf; keys are case-insensitive, as in slurm.conf.

    A file (`source`) without a single setting is a mistake: a full disk or a cut-off copy leaves such files.
    """
    where = str(source or "gpushare.conf")
    given: dict[str, tuple[int, str]] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.split("#", 1)[0].strip(_BLANK)
        if not line:
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(_BLANK), value.strip(_BLANK)
        key = _BY_NAME.get(name.lower()) if name.isascii() else None
        if not equals:
            raise ConfigError(f"{where}:{number}: '{line}' is not Key=Value", "See gpushare.conf(5) for the keys.")
        if key is None:
            raise ConfigError(f"{where}:{number}: unknown key '{name}'", "See gpushare.conf(5) for the keys.")
        if key.name in given:
            raise ConfigError(f"{where}:{number}: {key.name} is set twice", f"Line {given[key.name][0]} has it too.")
        given[key.name] = (number, value)
    if source is not None and not given:
        raise ConfigError(f"{where}: there is no setting in it", "Put it back, or write it anew: 'gpushare configure'.")
    values: dict[str, Any] = {}
    for key in KEYS:
        number, value = given.get(key.name, (0, key.default))
        try:
            values[key.attribute] = key.parse(value)
        except ValueError as why:
            raise ConfigError(f"{where}:{number}: {key.name}={value} {why}") from None
    return Config(**values, source=source)


def load_config(path: Path | None = None) -> Config:
    """The settings of `path`, by default of `config_path()`.

    A missing file is an error: nothing is shared by accident.
    """
    path = path or config_path()
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # to open it would wait for a writer, for ever
            raise OSError(errno.EINVAL, "Is a pipe")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", "Write one with 'gpushare configure', or point GPUSHARE_CONF at it."
        ) from None
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror if isinstance(why, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}", "It is a text file of root's, with mode 644.") from why
    return parse_config(text, path)


assert {key.attribute for key in KEYS} == {f.name for f in fields(Config)} - {"source"}

DEFAULTS = parse_config("")
"""What holds where a site says nothing."""


# The promise of a job: the most that sharing may slow it. The only place that says what it is.


@dataclass(frozen=True, slots=True)
class SitePromises:
    """What the site promises, in per cent of a job's run alone."""

    resident_pct: float
    """``ResidentBudget``: who was on the card first, or came to have it after who is there (a successor)."""
    guest_pct: float
    """``GuestCap``: who joined, for all of its run, also when it is alone by then."""

    def of(self, *, guest: bool, own_pct: float | None) -> float:
        """The promise of one job; its owner may have asked for less than the site promises (``max=``)."""
        site = self.guest_pct if guest else self.resident_pct
        return site if own_pct is None else min(site, float(own_pct))
