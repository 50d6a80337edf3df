"""Doctor's checks of Slurm's configuration: pure functions of the site's facts and our settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slurm_gpushare.config import Config
from slurm_gpushare.site.facts import Facts, gpu_count, job_defaults
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.release import Release, parse_release

Check = Callable[[Facts, Config], Iterable[Finding]]

_CONFIGURE = "Run 'gpushare configure' for the line."
_CLOCK_SLACK_S = 5.0


def release(facts: Facts, config: Config) -> Iterator[Finding]:
    """Known bugs of the release, and whether the hook was told the right one."""
    if facts.release < Release(22, 5):
        yield failed(
            "slurm-release", f"Slurm {facts.release} is older than 22.05", "Upgrade; 23.11.5 or newer is best."
        )
    elif not facts.release.keeps_whole_gpus_apart:
        yield warned(
            "slurm-release",
            f"Slurm {facts.release}: whole-GPU jobs may start beside a sharer; a restart of slurmctld loses shards",
            "Upgrade to 23.11.5 or newer. Until then the hook turns single-GPU requests into all shards of a GPU; "
            "do not restart slurmctld while jobs share.",
        )
    else:
        yield passed("slurm-release", f"Slurm {facts.release}")
    try:
        told = parse_release(config.slurm_version) if config.slurm_version else None
    except SlurmError:
        told = None
    if told != facts.release:
        yield failed(
            "slurm-version-key",
            f"gpushare.conf says SlurmVersion={config.slurm_version or 'nothing'}, slurmctld is {facts.release}",
            f"Set SlurmVersion={facts.release}: the hook cannot ask.",
        )


def select_plugin(facts: Facts, _: Config) -> Iterator[Finding]:
    found = facts.config.get("SelectType", "")
    if found == "select/cons_tres":
        yield passed("select-plugin", found)
    else:
        yield failed("select-plugin", f"SelectType={found} knows no shards", "Set SelectType=select/cons_tres.")


def gres_types(facts: Facts, _: Config) -> Iterator[Finding]:
    missing = {"gpu", "shard"} - set(facts.words("GresTypes"))
    if missing:
        yield failed("gres-types", f"GresTypes lacks {', '.join(sorted(missing))}", "Set GresTypes=gpu,shard.")
    else:
        yield passed("gres-types", "gpu and shard")


def partitions(facts: Facts, config: Config) -> Iterator[Finding]:
    """The partitions exist, and none has what we leave alone."""
    if not config.partitions:
        yield failed("partitions", "gpushare.conf names no partition: nothing is shared", "Set Partitions=.")
    good = []
    for name in config.partitions:
        partition = facts.partition(name)
        if partition is None:
            yield failed("partitions", f"there is no partition {name}", "Correct Partitions= in gpushare.conf.")
        elif "SUSPEND" in partition.fields.get("PreemptMode", "").upper():
            yield failed(
                "partitions",
                f"{name} preempts by SUSPEND: a suspended job keeps its GPU memory",
                "Use another PreemptMode, or take it out of Partitions=.",
            )
        elif partition.fields.get("ExclusiveUser", "NO").upper() == "YES":
            yield failed("partitions", f"{name} has ExclusiveUser=YES", "Take it out of Partitions=.")
        elif not facts.shared_nodes((name,)):
            yield failed("partitions", f"{name} has no node with GPUs", "Correct Partitions= in gpushare.conf.")
        else:
            good.append(name)
    if good and len(good) == len(config.partitions):
        yield passed("partitions", ", ".join(good))
    if (mcs := facts.config.get("MCSPlugin", "")) not in {"", "mcs/none", "(null)"}:
        yield failed("mcs", f"MCSPlugin={mcs} keeps users' jobs apart on nodes", "Share only where MCS is not in use.")


def defaults_per_gpu(facts: Facts, config: Config) -> Iterator[Finding]:
    """DefCpuPerGPU and DefMemPerGPU vanish with gpu requests unless gpushare.conf repeats them."""
    pairs = (
        ("DefCpuPerGPU", "DefCpuPerGpu", config.def_cpu_per_gpu),
        ("DefMemPerGPU", "DefMemPerGpu", config.def_mem_per_gpu_mib),
    )
    for slurm_key, our_key, ours in pairs:
        wanted = {
            name: job_defaults(partition).get(slurm_key)
            for name in config.partitions
            if (partition := facts.partition(name))
        }
        actual = {name: value for name, value in wanted.items() if value is not None}
        if actual != {name: value for name, value in ours.items() if name in wanted}:
            text = ",".join(f"{name}:{value}" for name, value in actual.items())
            yield failed(
                f"{our_key}", f"the partitions' {slurm_key} is not what gpushare.conf says", f"Set {our_key}={text}."
            )


def node_types(facts: Facts, config: Config) -> Iterator[Finding]:
    """One type an index, the feature, and all shards there."""
    bad = 0
    for node in facts.shared_nodes(config.partitions):
        indices = range(gpu_count(node))
        if set(node.gpus.values()) != {f"{config.gpu_model}_{index}" for index in indices}:
            bad += 1
            yield failed(
                "gpu-types",
                f"{node.name}: GPUs are not typed {config.gpu_model}_0, {config.gpu_model}_1, ...",
                "Write one type an index: 'gpushare configure' has the lines. The node must be drained.",
            )
        elif lost := [index for index in indices if node.shards_per_gpu.get(index, 0) < config.shards_per_gpu]:
            bad += 1
            yield failed(
                "lost-shards",
                f"{node.name}: GPU {lost[0]} has {node.shards_per_gpu.get(lost[0], 0)} of "
                f"{config.shards_per_gpu} shards; jobs for it wait for ever",
                "Check gres.conf's shard line. On 22.05 a restart of slurmctld loses them: drain the node, then "
                "restart slurmctld once it is empty.",
            )
        if config.gpu_model not in node.features:
            bad += 1
            yield failed(
                "node-feature",
                f"{node.name} lacks the feature {config.gpu_model}",
                f"Add Feature={config.gpu_model}: requests for gpu:{config.gpu_model} are turned into it.",
            )
        if gpu_count(node) > config.gpus_per_node:
            bad += 1
            yield failed(
                "gpus-per-node",
                f"{node.name} has {gpu_count(node)} GPUs, gpushare.conf says {config.gpus_per_node}",
                f"Set GpusPerNode={gpu_count(node)}.",
            )
    if not bad:
        yield passed(
            "gpu-types", f"{len(facts.shared_nodes(config.partitions))} nodes, one type an index, no shard lost"
        )


def autodetect(facts: Facts, _: Config) -> Iterator[Finding]:
    text = facts.files.get("gres.conf")
    if text is None:
        return  # a configless node has none beside slurm.conf
    detected = [value for value in re.findall(r"(?im)^[^#\n]*\bAutoDetect\s*=\s*(\w+)", text) if value.lower() != "off"]
    if detected:
        yield failed(
            "autodetect",
            f"gres.conf has AutoDetect={detected[0]}: it finds other types than those by index",
            "Set AutoDetect=off and write the devices out.",
        )
    else:
        yield passed("autodetect", "off")


def accounting(facts: Facts, _: Config) -> Iterator[Finding]:
    if facts.limits is None:
        yield warned(
            "accounting", "slurmdbd does not answer: no reports, and limits were not checked", "Start slurmdbd."
        )
    missing = {"gres/gpu", "gres/shard"} - set(facts.words("AccountingStorageTRES"))
    if missing:
        yield failed("accounting-tres", f"AccountingStorageTRES lacks {', '.join(sorted(missing))}", _CONFIGURE)
    else:
        yield passed("accounting-tres", "gres/gpu and gres/shard")


def limits(facts: Facts, config: Config) -> Iterator[Finding]:
    """A limit or price on GPUs that sharing would slip past."""
    bad = False
    for limit in facts.limits or ():
        if "gres/gpu" in limit.tres and "gres/shard" not in limit.tres:
            bad = True
            yield failed(
                "limits",
                f"{limit} counts gres/gpu and not gres/shard: sharing slips past it",
                "Run the sacctmgr line that 'gpushare configure' prints.",
            )
    for name in config.partitions:
        partition = facts.partition(name)
        weights = values.tres(partition.fields.get("TRESBillingWeights", "")) if partition else {}
        if _counts_gpus_only(weights):
            bad = True
            yield failed("billing", f"partition {name} bills gres/gpu and not gres/shard: sharing is free", _CONFIGURE)
    if _counts_gpus_only(values.tres(facts.config.get("PriorityWeightTRES", ""))):
        bad = True
        yield failed(
            "priority", "PriorityWeightTRES counts gres/gpu and not gres/shard", "Add gres/shard with its share."
        )
    if not bad:
        yield passed("limits", "every limit and price on GPUs has its equivalent in shards")


def _counts_gpus_only(tres: dict[str, str]) -> bool:
    names = {name.lower().partition(":")[0] for name in tres}
    return "gres/gpu" in names and "gres/shard" not in names


def constrain_devices(facts: Facts, _: Config) -> Iterator[Finding]:
    text = facts.files.get("cgroup.conf", "")
    constrained = re.search(r"(?im)^\s*ConstrainDevices\s*=\s*yes", text)
    if constrained and "cgroup" in facts.config.get("TaskPlugin", ""):
        yield passed("constrain-devices", "jobs see only their own GPUs")
    else:
        yield warned(
            "constrain-devices",
            "a job that overwrites CUDA_VISIBLE_DEVICES reaches other jobs' GPUs",
            "Set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup.",
        )


def hook(facts: Facts, _: Config) -> Iterator[Finding]:
    """job_submit: the plugin, our lines in it, our files beside it, and LuaSQL for its Lua."""
    if "lua" not in {word.removeprefix("job_submit/") for word in facts.words("JobSubmitPlugins")}:
        yield failed("hook", "JobSubmitPlugins lacks lua: no job is tagged", "Set JobSubmitPlugins=lua.")
    elif not _calls_us(facts, "job_submit.lua"):
        yield failed("hook", f"{facts.etc}/job_submit.lua does not call us", _CONFIGURE)
    else:
        yield passed("hook", "job_submit.lua calls us")
    yield from _lua_sqlite(facts)


def _calls_us(facts: Facts, name: str) -> bool:
    """Whether the script names us, itself or in a file that it runs."""
    own = facts.files.get(name, "")
    texts = [own, *(_text(Path(path)) for path in re.findall(r"""dofile\(\s*["']([^"']+)["']""", own))]
    return any("gpushare" in text for text in texts)


def _lua_sqlite(facts: Facts) -> Iterator[Finding]:
    plugin = Path(facts.config.get("PluginDir", "").split(":")[0]) / "job_submit_lua.so"
    if not plugin.is_file():
        return  # not the controller
    version = re.search(rb"liblua-?(5\.\d)", plugin.read_bytes())
    if version is None:
        return
    number = version[1].decode()
    places = [
        path
        for root in ("/usr/lib", "/usr/lib64", "/usr/local/lib")
        for path in Path(root).glob(f"**/lua/{number}/luasql/sqlite3.so")
    ]
    if places:
        yield passed("luasql", f"LuaSQL for Lua {number}, which slurmctld's plugin uses")
    else:
        yield failed(
            "luasql",
            f"slurmctld's Lua {number} has no luasql.sqlite3: every job goes untagged",
            "Install lua-sql-sqlite3 (Debian) or luasql for that Lua.",
        )


def cli_filter(facts: Facts, _: Config) -> Iterator[Finding]:
    plugin = "lua" in {word.removeprefix("cli_filter/") for word in facts.words("CliFilterPlugins")}
    if plugin and _calls_us(facts, "cli_filter.lua"):
        yield passed("cli-filter", "cli_filter.lua calls us")
    else:
        yield warned(
            "cli-filter",
            "no client filter: 'srun --gpus=1' and 'srun --gres=gpu:1' fail inside shared jobs, and "
            "--comment=gpushare:NAME is not turned into a token",
            _CONFIGURE,
        )


def prologs(facts: Facts, _: Config) -> Iterator[Finding]:
    for key, check, loss in (
        ("Prolog", "prolog", "no job is profiled"),
        ("Epilog", "epilog", "samplers end late"),
        ("TaskProlog", "task-prolog", "plain srun fails inside shared jobs"),
    ):
        paths = [path for pattern in facts.scripts(key) for path in _glob(pattern) if path.is_file()]
        if any("gpushare" in path.name or "gpushare" in _text(path) for path in paths):
            yield passed(check, f"{key} calls us")
        else:
            yield failed(check, f"{key} does not call us: {loss}", _CONFIGURE)


def _glob(pattern: str) -> list[Path]:
    path = Path(pattern)
    if not path.is_absolute():
        return []
    return sorted(path.parent.glob(path.name)) if "*" in path.name else [path]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def clock(facts: Facts, _: Config) -> Iterator[Finding]:
    """Leases and heartbeats compare times of controller and nodes."""
    told = values.integer(facts.config.get("as_of", ""))
    if told is None:
        return
    off = abs(facts.asked_s - told)
    if off > _CLOCK_SLACK_S:
        yield failed("clock", f"this machine and slurmctld are {off:.0f} s apart", "Run chrony or ntpd on both.")
    else:
        yield passed("clock", "agrees with slurmctld's")


SLURM_CHECKS: tuple[Check, ...] = (
    release, select_plugin, gres_types, partitions, defaults_per_gpu, node_types, autodetect, accounting, limits,
    constrain_devices, hook, cli_filter, prologs, clock,
)  # fmt: skip
