"""gpushare.conf: the site's settings, in Slurm's own ``Key=Value`` style.

`KEYS` is the single list of what may be set: the parser, the documentation, the man page and
``gpushare configure`` all read it. The Lua hook reads the same file and takes the few keys it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_gpushare.errors import ConfigError

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


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


def _yes_no(value: str) -> bool:
    lowered = value.lower()
    if lowered not in {"yes", "no"}:
        raise ValueError("must be yes or no")
    return lowered == "yes"


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        lowered = value.lower()
        if lowered not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return lowered

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isdecimal() or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return number

    return parse


def _per_partition(value: str) -> Mapping[str, int]:
    """``gpu:8,debug:4`` -> {"gpu": 8, "debug": 4}."""
    result: dict[str, int] = {}
    for item in _names(value):
        name, _, number = item.rpartition(":")
        if not name or not number.isdecimal():
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


KEYS: tuple[Key, ...] = (
    Key("Partitions", "partitions", _names, "", "Partitions whose jobs may share GPUs. Empty: none."),
    Key("ShardsPerGpu", "shards_per_gpu", _integer(2, 64), "2",
        "Shards that gres.conf gives each GPU. Two jobs share a card whatever the number; all shards of a GPU are the whole card."),
    Key("GpuModel", "gpu_model", _text, "v100",
        "The site's name of the shared GPUs: a node feature, and the start of each index's GRES type (v100_0, v100_1, ...)."),
    Key("GpusPerNode", "gpus_per_node", _integer(1, 64), "4", "GPUs on a shared node."),
    Key("SlurmVersion", "slurm_version", str, "",
        "Release of slurmctld, as sinfo -V prints it (22.05.8). The hook needs it, since Lua cannot ask; configure writes it."),
    Key("DefCpuPerGpu", "def_cpu_per_gpu", _per_partition, "",
        "The partitions' DefCpuPerGPU (gpu:8,debug:4). Shards do not inherit it, so the hook asks for those CPUs itself."),
    Key("DefMemPerGpu", "def_mem_per_gpu_mib", _per_partition, "",
        "The partitions' DefMemPerGPU in MiB (gpu:16000). Shards do not inherit it either."),
    Key("StoreUrl", "store_url", _text, "sqlite:////var/lib/gpushare/store.sqlite",
        "SQLAlchemy URL of the store: an SQLite file on the controller, or mysql+pymysql://... where controllers are several."),
    Key("HookFile", "hook_file", _path, "/var/lib/gpushare/hook.sqlite",
        "The small SQLite file that the submit hook reads. The helper keeps it up to date."),
    Key("SpoolDir", "spool_dir", _path, "/var/spool/gpushare",
        "Where compute nodes leave telemetry records for the helper: on a file system that nodes and controller share."),
    Key("RecordsTo", "records_to", _choice("spool", "store"), "spool",
        "Where nodes leave records: in SpoolDir, or straight in the database of StoreUrl where no file system is shared."),
    Key("MungeSocket", "munge_socket", _optional_path, "",
        "Socket of munged, by whose credentials records prove who made them. Empty: munge's own default."),
    Key("NodeUsers", "node_users", _names, "root",
        "Users (or uids) whose records speak for a node: root, and SlurmdUser where it is another."),
    Key("StateDir", "state_dir", _path, "/run/gpushare",
        "Local directory of the helper's lock and of each node's samplers."),
    Key("DcgmJobMappingDir", "dcgm_job_mapping_dir", _optional_path, "",
        "Directory of DCGM's job mapping files (DCGM_HPC_JOB_MAPPING_DIR). Empty: not written."),
    Key("SampleSeconds", "sample_s", _number(0.05, 60), "0.5", "Time between two telemetry samples."),
    Key("InterimSeconds", "interim_s", _number(1, 3600), "30", "Time between two interim records of a running job."),
    Key("ProbeSeconds", "probe_s", _number(1, 604800), "3600",
        "Longest time that a profile covers if the job does not tell the end of its first epoch."),
    Key("LeaseSeconds", "lease_s", _integer(1, 600), "30",
        "Longest time that a submitted job waits for the helper before Slurm may start it as it was asked for."),
    Key("TickSeconds", "tick_s", _number(0.2, 600), "5", "Time between two looks of the helper at the queue."),
    Key("HeartbeatSeconds", "heartbeat_s", _integer(5, 3600), "60",
        "Age of the helper's heartbeat from which the hook and the watchdog take it for dead."),
    Key("Policy", "policy", _choice("gpushare", "paper", "fcfs", "random", "off"), "gpushare", "Who shares with whom."),
    Key("Objective", "objective", _choice("completion", "saving"), "completion",
        "What the policy gpushare aims at: least total completion time, or most GPU time saved."),
    Key("ShareAcross", "share_across", _choice("any", "account", "user"), "any",
        "Whose jobs may sit beside each other: anybody's who opted in, one account's, or one user's."),
    Key("ResidentBudget", "resident_budget_pct", _number(0, 1000), "25",
        "Most that all guests together may lengthen the whole run of the job that had the GPU first, in per cent."),
    Key("GuestCap", "guest_cap_pct", _number(0, 1000), "50",
        "Most that a job is slowed which joins another on its GPU, in per cent."),
    Key("MemoryHeadroom", "memory_headroom_pct", _number(0, 50), "5",
        "GPU memory that must stay free beside both jobs' peaks, in per cent of the card."),
    Key("ExtendTimeLimit", "extend_time_limit", _yes_no, "no",
        "Whether the helper adds the measured slow-down to the time limits of sharing jobs."),
    Key("OnSlowdown", "on_slowdown", _choice("report", "requeue"), "report",
        "What happens when a job is slowed well past what it was promised."),
    Key("RawShards", "raw_shards", _choice("deny", "allow"), "deny",
        "Whether users may ask for shards by hand on the shared partitions."),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings in force; one attribute for each entry of `KEYS`."""

    partitions: tuple[str, ...]
    shards_per_gpu: int
    gpu_model: str
    gpus_per_node: int
    slurm_version: str
    def_cpu_per_gpu: Mapping[str, int]
    def_mem_per_gpu_mib: Mapping[str, int]
    store_url: str
    hook_file: Path
    spool_dir: Path
    records_to: str
    munge_socket: Path | None
    node_users: tuple[str, ...]
    state_dir: Path
    dcgm_job_mapping_dir: Path | None
    sample_s: float
    interim_s: float
    probe_s: float
    lease_s: int
    tick_s: float
    heartbeat_s: int
    policy: str
    objective: str
    share_across: str
    resident_budget_pct: float
    guest_cap_pct: float
    memory_headroom_pct: float
    extend_time_limit: bool
    on_slowdown: str
    raw_shards: str
    source: Path | None = field(default=None, compare=False)


_BY_NAME = {key.name.lower(): key for key in KEYS}


def parse_config(text: str, source: Path | None = None) -> Config:
    """Settings from the text of a gpushare.conf; keys are case-insensitive, as in slurm.conf."""
    where = str(source or "gpushare.conf")
    given: dict[str, tuple[int, str]] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        name, equals, value = line.partition("=")
        key = _BY_NAME.get(name.strip().lower())
        if not equals:
            raise ConfigError(f"{where}:{number}: '{line}' is not Key=Value")
        if key is None:
            raise ConfigError(f"{where}:{number}: unknown key '{name.strip()}'", "See gpushare.conf(5) for the keys.")
        if key.name in given:
            raise ConfigError(f"{where}:{number}: {key.name} is set twice", f"Line {given[key.name][0]} has it too.")
        given[key.name] = (number, value.strip())
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
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", "Write one with 'gpushare configure', or point GPUSHARE_CONF at it."
        ) from None
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"{path}: cannot be read: {why}") from why
    return parse_config(text, path)


assert {key.attribute for key in KEYS} == {f.name for f in fields(Config)} - {"source"}
