"""gpushare.conf: the site's settings, in Slurm's own ``Key=Value`` style, and what ``gpushare configure`` works out.

The fields of `Config` are the single list of what may be set. The parser here, the tables that the hook (Lua) and the
prolog (shell) read the same files by, the man page and docs/configuration.md are all made from it
(scripts/make_reference.py).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from slurm_gpushare.protocol.errors import ConfigError

DEFAULT_PATH = Path("/etc/slurm/gpushare.conf")
GENERATED_SUFFIX = ".generated.conf"


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """``GPUSHARE_CONF``, else gpushare.conf beside the slurm.conf in use."""
    if explicit := environ.get("GPUSHARE_CONF"):
        return Path(explicit)
    if slurm_conf := environ.get("SLURM_CONF"):
        return Path(slurm_conf).with_name("gpushare.conf")
    return DEFAULT_PATH


def generated_path(path: Path) -> Path:
    """The file beside gpushare.conf that ``configure`` writes and nobody edits."""
    return path.with_name(path.name.removesuffix(".conf") + GENERATED_SUFFIX)


_BLANK = " \t\r"
"""What separates words; the hook and the prolog, which read the same files, know no other."""
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)
_WHOLE = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key's value looks like. The Lua and the shell reader have a parser for each `name` that they meet."""

    name: str
    parse: Callable[[str], Any]
    """Raises ValueError with the end of a sentence."""
    bounds: tuple[str, ...] = ()
    """Lowest and highest number, or the words that there are."""


def _text(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


def _path(value: str) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


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


def _per_partition(value: str) -> Mapping[str, int]:
    """``gpu:8,debug:4`` -> {"gpu": 8, "debug": 4}."""
    result: dict[str, int] = {}
    for item in _names(value):
        name, _, number = item.rpartition(":")
        if not name or not _WHOLE.fullmatch(number):
            raise ValueError("must be PARTITION:NUMBER[,PARTITION:NUMBER...]")
        result[name] = int(number)
    return result


def _choice(*allowed: str) -> Kind:
    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value.lower()

    return Kind("choice", parse, allowed)


def _bounded(name: str, form: re.Pattern[str], number: type[float], low: float, high: float) -> Kind:
    def parse(value: str) -> float:
        if not form.fullmatch(value) or not low <= number(value) <= high:
            raise ValueError(f"must be a {name.replace('whole', 'whole number')} from {low:g} to {high:g}")
        return number(value)

    return Kind(name, parse, (f"{low:g}", f"{high:g}"))


_whole, _number = partial(_bounded, "whole", _WHOLE, int), partial(_bounded, "number", _NUMBER, float)


_TEXT, _NAMES, _MODELS, _PATH = Kind("text", _text), Kind("names", _names), Kind("models", _models), Kind("path", _path)
_OPTIONAL_PATH = Kind("optional_path", lambda value: _path(value) if value else None)
_PER_PARTITION, _VERSION = Kind("per_partition", _per_partition), Kind("version", str)
_WORDS = _choice("yes", "no")
_YES_NO = replace(_WORDS, parse=lambda value: _WORDS.parse(value) == "yes")


class Place(StrEnum):
    """Where a key belongs."""

    SITE = "site"  # gpushare.conf
    GENERATED = "generated"  # the file that configure writes; in gpushare.conf it counts while that file is silent
    CONSTANT = "constant"  # nowhere: another value than ours is obeyed for two more releases, and said


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: how it is written, what it becomes, what it means."""

    name: str
    kind: Kind
    default: str
    help: str
    place: Place
    hook: bool
    """Whether slurmctld's hook needs it."""
    node: bool
    """Whether the scripts of the compute node need it."""
    attribute: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The words that it may be set to; none where it takes any text or number."""
        return self.kind.bounds if self.kind.name == "choice" else ()


def _key(
    name: str, kind: Kind, default: str, *, help: str, place: Place = Place.SITE, hook: bool = False, node: bool = False
) -> Any:
    return field(metadata={"key": Key(name, kind, default, help, place, hook, node)})


POLICIES = ("gpushare", "paper", "fcfs", "random", "shadow", "off")
"""Who shares with whom: the helper's policies."""
PLACES_NOBODY = frozenset({"shadow", "off"})
"""Policies under which no job is given a card."""


# fmt: off
@dataclass(frozen=True)
class Config:
    """The settings in force."""

    partitions: tuple[str, ...] = _key("Partitions", _NAMES, "", hook=True, node=True, help=
        "Partitions whose jobs may share GPUs. Empty: none.")
    shards_per_gpu: int = _key("ShardsPerGpu", _whole(2, 64), "2", hook=True, help=
        "Shards that gres.conf gives each GPU. Two jobs share a card whatever the number; all shards of a GPU are the whole card.")
    gpu_models: tuple[str, ...] = _key("GpuModel", _MODELS, "v100", hook=True, help=
        "The site's name of the shared GPUs: a node feature, and the start of each index's GRES type (v100_0, v100_1, ...). Several models, separated by commas, share each for itself, with its own knowledge.")
    store_url: str = _key("StoreUrl", _TEXT, "sqlite:////var/lib/gpushare/store.sqlite", help=
        "SQLAlchemy URL of the store: an SQLite file on the controller, or mysql+pymysql://... where controllers are several. file:PATH: the URL, with its password, is in that file.")
    hook_file: Path = _key("HookFile", _PATH, "/var/lib/gpushare/hook.sqlite", hook=True, help=
        "The small SQLite file that the submit hook reads. The helper keeps it up to date.")
    spool_dir: Path = _key("SpoolDir", _PATH, "/var/spool/gpushare", node=True, help=
        "Where compute nodes leave telemetry records for the helper: on a file system that nodes and controller share.")
    records_to: str = _key("RecordsTo", _choice("spool", "store"), "spool", help=
        "Where nodes leave records: in SpoolDir, or straight in the database of StoreUrl where no file system is shared.")
    public_dir: Path = _key("PublicDir", _PATH, "/var/spool/gpushare/public", help=
        "Where the helper tells users about their jobs: a directory that only SlurmUser writes and everybody reads, also on login nodes.")
    dcgm_job_mapping_dir: Path | None = _key("DcgmJobMappingDir", _OPTIONAL_PATH, "", node=True, help=
        "Directory of DCGM's job mapping files (DCGM_HPC_JOB_MAPPING_DIR). Empty: not written.")
    probe_s: float = _key("ProbeSeconds", _number(1, 604800), "3600", help=
        "Longest time that a profile covers if the job does not tell the end of its first epoch.")
    backend: str = _key("Backend", _choice("commands", "auto", "pyslurm"), "commands", help=
        "How the helper reads the queue: Slurm's commands, or pyslurm (GPL-2.0, an extra, Slurm 25.11 only). auto takes pyslurm where it fits.")
    lease_s: int = _key("LeaseSeconds", _whole(1, 600), "30", hook=True, help=
        "Longest time that a submitted job waits for the helper before Slurm may start it as it was asked for.")
    tick_s: float = _key("TickSeconds", _number(0.2, 600), "5", help=
        "Time between two looks of the helper at the queue.")
    epilog_hold_s: float = _key("EpilogHold", _number(0, 2), "1", node=True, help=
        "Longest time that an epilog keeps a card which has just become empty, so that the helper decides who gets it. 0: none.")
    keep_days: int = _key("KeepDays", _whole(7, 36500), "365", help=
        "How long the store remembers runs, decisions and observations, and tokens that nobody uses; once a day the helper forgets what is older.")
    policy: str = _key("Policy", _choice(*POLICIES), "gpushare", hook=True, help=
        "Who shares with whom. gpushare: who loses least by it; paper: clusters that complement each other; fcfs: the first that fits; random: any that fits; shadow: nobody, but everything is planned and recorded as with gpushare, and the report says what it would have done; off: nobody.")
    objective: str = _key("Objective", _choice("completion", "saving"), "completion", help=
        "What the policy gpushare aims at: least total completion time, or most GPU time saved (jobs then share also while GPUs are idle).")
    share_across: str = _key("ShareAcross", _choice("any", "account", "user"), "any", help=
        "Whose jobs may sit beside each other: anybody's who opted in, one account's, or one user's.")
    share_gangs: bool = _key("ShareGangs", _YES_NO, "no", hook=True, help=
        "Whether two jobs that each ask for all GPUs of a node may share that node. Needs Slurm 23.11.5 or newer, and MULTIPLE_SHARING_GRES_PJ and ONE_TASK_PER_SHARING_GRES in SelectTypeParameters; without them such jobs run as written.")
    resident_budget_pct: float = _key("ResidentBudget", _number(0, 1000), "25", help=
        "Most that all guests together may lengthen the whole run of the job that had the GPU first, in per cent.")
    guest_cap_pct: float = _key("GuestCap", _number(0, 1000), "50", help=
        "Most that a job is slowed which joins another on its GPU, in per cent.")
    extend_time_limit: bool = _key("ExtendTimeLimit", _YES_NO, "yes", help=
        "Whether the helper adds what sharing cost a job, as measured, to its time limit: nobody dies of sharing.")
    framework_memory: str = _key("FrameworkMemory", _choice("grow", "fence", "leave"), "grow", node=True, help=
        "Whether jobs with a token get TF_FORCE_GPU_ALLOW_GROWTH=true and XLA_PYTHON_CLIENT_PREALLOCATE=false, unless they set these themselves. fence: PyTorch too is held to its shards' part of the card, by per_process_memory_fraction; releases that do not know it fail at their first use of CUDA.")
    mps: str = _key("Mps", _choice("off", "user", "all"), "off", hook=True, node=True, help=
        "Whether jobs with a token on one card are clients of NVIDIA's MPS there, by the unit gpushare-mps@N: user lets only one user's jobs meet on a card, all those of several, without isolation between them. Not tried on a real card yet: see docs/real-cards.md.")
    on_slowdown: str = _key("OnSlowdown", _choice("pause", "requeue", "report"), "pause", help=
        "What happens when a resident's promise is about to be broken: pause who came last, requeue it where its owner has agreed, or only report it.")
    raw_shards: str = _key("RawShards", _choice("deny", "allow"), "deny", hook=True, help=
        "Whether users may ask for shards by hand on the shared partitions. deny: such a job is refused with one line; allow: Slurm decides.")

    # What configure works out, in a file of its own.
    slurm_version: str = _key("SlurmVersion", _VERSION, "", place=Place.GENERATED, hook=True, help=
        "Release of slurmctld, as sinfo -V prints it (22.05.8). The hook needs it, since Lua cannot ask; while Slurm is another one no job is converted.")
    gpus_per_node: int = _key("GpusPerNode", _whole(1, 64), "4", place=Place.GENERATED, hook=True, help=
        "GPUs on a shared node.")
    def_cpu_per_gpu: Mapping[str, int] = _key("DefCpuPerGpu", _PER_PARTITION, "", place=Place.GENERATED, hook=True, help=
        "The partitions' DefCpuPerGPU (gpu:8,debug:4). Shards do not inherit it, so the hook asks for those CPUs itself.")
    def_mem_per_gpu_mib: Mapping[str, int] = _key("DefMemPerGpu", _PER_PARTITION, "", place=Place.GENERATED, hook=True, help=
        "The partitions' DefMemPerGPU in MiB (gpu:16000). Shards do not inherit it either.")
    slurm_user: str = _key("SlurmUser", _TEXT, "slurm", place=Place.GENERATED, node=True, help=
        "SlurmUser of slurm.conf (or its uid), who runs the helper. Nodes hold cards for nobody else.")
    node_users: tuple[str, ...] = _key("NodeUsers", _NAMES, "root", place=Place.GENERATED, help=
        "Users (or uids) whose records speak for a node: root and SlurmdUser.")
    munge_socket: Path | None = _key("MungeSocket", _OPTIONAL_PATH, "", place=Place.GENERATED, help=
        "Socket of munged, by whose credentials records prove who made them: slurm.conf's AuthInfo. Empty: munge's own default.")

    # What nobody has had to change, and why.
    state_dir: Path = _key("StateDir", _PATH, "/run/gpushare", place=Place.CONSTANT, node=True, help=
        "Local directory of the helper's lock and of each node's samplers. Why: /run is what a reboot empties, and is there on every node.")
    sample_s: float = _key("SampleSeconds", _number(0.05, 60), "0.5", place=Place.CONSTANT, help=
        "Time between two telemetry samples. Why: NVML's own sample period is a sixth of a second to one second.")
    interim_s: float = _key("InterimSeconds", _number(1, 3600), "30", place=Place.CONSTANT, help=
        "Time between two interim records of a running job. Why: that much is lost with a node that dies, and more records would cost and tell nothing.")
    heartbeat_s: int = _key("HeartbeatSeconds", _whole(5, 3600), "60", place=Place.CONSTANT, hook=True, help=
        "Age of the helper's heartbeat from which the hook and the watchdog take it for dead, and users' commands what it published for old. Why: a tick takes about one second at 10,000 waiting jobs, and slurmctld is restarted in less.")
    memory_headroom_pct: float = _key("MemoryHeadroom", _number(0, 50), "5", place=Place.CONSTANT, help=
        "GPU memory that must stay free beside both jobs' peaks, in per cent of the card. Why: allocators lose to fragments what no measured peak shows.")
    pause_most_pct: float = _key("PauseMost", _number(0, 100), "25", place=Place.CONSTANT, help=
        "Most that a job is paused in all, in per cent of its time limit, or of its expected run where it has none. Why: the guest that stands still loses no more than a resident may.")

    source: Path | None = field(default=None, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Keys that stand where they no longer belong: one sentence each."""
    # fmt: on

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


KEYS: tuple[Key, ...] = tuple(replace(f.metadata["key"], attribute=f.name) for f in fields(Config) if f.metadata)
_BY_NAME = {key.name.lower(): key for key in KEYS}


@dataclass(frozen=True, slots=True)
class _Line:
    """A key as it is written in a file."""

    where: str
    key: Key
    value: str


def _lines(text: str, where: str) -> dict[str, _Line]:
    """The settings in a text, by the key's name; ConfigError for anything else in it."""
    found: dict[str, _Line] = {}
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
        if key.name in found:
            first = found[key.name].where.rpartition(":")[2]
            raise ConfigError(f"{where}:{number}: {key.name} is set twice", f"Line {first} has it too.")
        found[key.name] = _Line(f"{where}:{number}", key, value)
    return found


def _out_of_place(given: Mapping[str, _Line], generated: Mapping[str, _Line]) -> tuple[str, ...]:
    """What to say of keys in gpushare.conf that belong elsewhere now."""
    found = []
    for name, line in given.items():
        if line.key.place is Place.GENERATED:
            place = f"is worked out by 'gpushare configure --write' now, into a file beside it (*{GENERATED_SUFFIX})"
            found.append(f"{line.where}: {name} {place}; {'this line counts no more' if name in generated else 'obeyed'}")
        elif line.key.place is Place.CONSTANT:
            what = "has no effect" if line.value == line.key.default else "is obeyed for two more releases"
            found.append(f"{line.where}: {name} is {line.key.default} everywhere now; {name}={line.value} {what}")
    return tuple(found)


def parse_config(text: str, source: Path | None = None, generated: str | None = None) -> Config:
    """Settings from the text of a gpushare.conf and of the generated file; keys are case-insensitive, as in slurm.conf.

    A file (`source`) without a single setting is a mistake: a full disk or a cut-off copy leaves such files. What the
    generated file says of its own keys counts; what it says of others is passed over.
    """
    where = str(source or "gpushare.conf")
    given = _lines(text, where)
    if source is not None and not given:
        raise ConfigError(f"{where}: there is no setting in it", "Put it back, or write it anew: 'gpushare configure'.")
    worked_out: Mapping[str, _Line] = {}
    if generated is not None:
        beside = str(generated_path(source or Path("gpushare.conf")))
        worked_out = {n: line for n, line in _lines(generated, beside).items() if line.key.place is not Place.SITE}
        if not worked_out:
            raise ConfigError(f"{beside}: there is no setting in it", "Write it anew: 'gpushare configure --write'.")
    values: dict[str, Any] = {}
    for key in KEYS:
        line = worked_out.get(key.name) or given.get(key.name) or _Line(where, key, key.default)
        try:
            values[key.attribute] = key.kind.parse(line.value)
        except ValueError as why:
            raise ConfigError(f"{line.where}: {key.name}={line.value} {why}") from None
    return Config(**values, source=source, warnings=_out_of_place(given, worked_out))


def load_config(path: Path | None = None) -> Config:
    """The settings of `path`, by default of `config_path()`, and of the generated file beside it.

    A missing gpushare.conf is an error: nothing is shared by accident.
    """
    path = path or config_path()
    try:
        text = _read(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", "Write one with 'gpushare configure', or point GPUSHARE_CONF at it."
        ) from None
    return parse_config(text, path, _generated(path))


def settings_text(path: Path) -> str:
    """Both files as one text, which says alone what they say together; OSError, UnicodeDecodeError or ConfigError."""
    text, generated = path.read_text(encoding="utf-8"), _generated(path)
    if generated is None:
        return text
    worked_out = _lines(generated, "").values()
    moved = {line.key.name.lower() for line in worked_out if line.key.place is not Place.SITE}
    kept = [line for line in text.splitlines() if line.partition("=")[0].strip(_BLANK).lower() not in moved]
    kept += [f"{line.key.name}={line.value}" for line in worked_out if line.key.name.lower() in moved]
    return "".join(f"{line}\n" for line in kept)


def _generated(path: Path) -> str | None:
    try:
        return _read(generated_path(path))
    except FileNotFoundError:
        return None


def _read(path: Path) -> str:
    """A file's text. FileNotFoundError; ConfigError where it is there and cannot be read."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # to open it would wait for a writer, for ever
            raise OSError(errno.EINVAL, "Is a pipe")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as why:
        reason = why.strerror if isinstance(why, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}", "It is a text file of root's, with mode 644.") from why


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
