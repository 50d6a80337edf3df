"""Doctor's checks of Slurm's configuration: pure functions of the site's facts and our settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from slurm_gpushare.protocol.release import Release, is_stale
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.users import user_name
from slurm_gpushare.site import current_setup
from slurm_gpushare.site.current_setup import SiteSetup, gpu_count, gpu_types, job_defaults
from slurm_gpushare.site.finding import Finding, failed, passed, warned
from slurm_gpushare.site.script_checks import SCRIPT_CHECKS
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.configuration import missing_for_gangs, slurm_user, suspends_by_itself
from slurm_gpushare.slurm.nodes import WITHOUT_SHARDS

Check = Callable[[SiteSetup, Config], Iterable[Finding]]

_CONFIGURE = "Run 'gpushare configure' for the line."
_CLOCK_SLACK_S = 5.0


def release(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Known bugs of the release, and whether the hook was told the right one."""
    if facts.release < Release(22, 5):
        yield failed(
            "slurm-release", f"Slurm {facts.release} is older than 22.05", "Upgrade; 23.11.5 or newer is best."
        )
    elif not facts.release.keeps_whole_gpus_apart:
        yield warned(
            "slurm-release",
            f"Slurm {facts.release}: whole-GPU jobs may start beside a sharer; a restart of slurmctld loses shards; "
            "a job keeps the GPU index that it got at submission, so fewer can share "
            "(0.58 of the jobs instead of 0.74 in a replay; docs/evaluation.md)",
            "Upgrade to 23.11.5 or newer. Until then the hook turns single-GPU requests into all shards of a GPU; "
            "do not restart slurmctld while jobs share.",
        )
    else:
        yield passed("slurm-release", f"Slurm {facts.release}")
    if not config.slurm_version or is_stale(config.slurm_version, facts.release):
        yield failed(
            "slurm-version-key",
            f"SlurmVersion is {config.slurm_version or 'nothing'} in our settings, slurmctld is {facts.release}: "
            "no job is converted",
            "Run 'gpushare configure --write' again: the hook cannot ask.",
        )
    for warning in config.warnings:
        yield warned("settings", warning, "Run 'gpushare configure --write', or take the line out.")


def select_plugin(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    found = facts.config.get("SelectType", "")
    if found == "select/cons_tres":
        yield passed("select-plugin", found)
    else:
        yield failed("select-plugin", f"SelectType={found} knows no shards", "Set SelectType=select/cons_tres.")


def gangs(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Whether two jobs that each want a whole node can share it, where that is wanted."""
    missing = missing_for_gangs(facts.config)
    if not config.share_gangs:
        yield passed("gangs", "not wanted: ShareGangs=no")
    elif not facts.release.keeps_whole_gpus_apart:
        yield failed(
            "gangs",
            f"ShareGangs=yes, but Slurm {facts.release} cannot",
            "Upgrade to 23.11.5 or newer, or set it to no.",
        )
    elif missing:
        yield failed(
            "gangs",
            f"ShareGangs=yes, but SelectTypeParameters lacks {', '.join(missing)}",
            "Add that in slurm.conf and restart slurmctld. Until then jobs that want a whole node run as written.",
        )
    else:
        yield passed("gangs", f"jobs that want all {config.gpus_per_node} GPUs of a node may share it")


def gres_types(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    missing = {"gpu", "shard"} - set(facts.words("GresTypes"))
    if missing:
        yield failed("gres-types", f"GresTypes lacks {', '.join(sorted(missing))}", "Set GresTypes=gpu,shard.")
    else:
        yield passed("gres-types", "gpu and shard")


def pausing(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Whether promises can be kept by pausing."""
    if config.on_slowdown != "pause":
        yield passed("pausing", f"not wanted: OnSlowdown={config.on_slowdown}")
    elif suspends_by_itself(facts.config):
        yield warned(
            "pausing",
            f"PreemptMode={facts.config.get('PreemptMode', '')}: Slurm suspends jobs itself: promises are only watched",
            "Use another PreemptMode, or set OnSlowdown=report.",
        )
    elif stranger := _powerless_helper(facts, config):
        yield warned(
            "pausing",
            f"the helper runs as {stranger}, which Slurm lets suspend others' jobs only if it is an operator; "
            "else promises are only watched",
            f"Run it as {slurm_user(facts.config).name}, as the unit does.",
        )
    else:
        yield passed("pausing", f"at most 5 minutes at a time, {config.pause_most_pct:g} % in all")


def _powerless_helper(facts: SiteSetup, config: Config) -> str | None:
    """Whom the helper runs as, if that is neither SlurmUser nor root; the hook's file is the helper's own."""
    try:
        uid = config.hook_file.stat().st_uid
    except OSError:
        return None  # no helper has run, or this is not the controller
    return None if uid in {0, slurm_user(facts.config).uid} else user_name(uid)


def partitions(facts: SiteSetup, config: Config) -> Iterator[Finding]:
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
        elif not facts.shared_nodes((name,), config.gpu_models):
            yield failed(
                "partitions",
                f"{name} has no node with {' or '.join(config.gpu_models)} GPUs",
                "Correct Partitions= in gpushare.conf.",
            )
        else:
            good.append(name)
    if good and len(good) == len(config.partitions):
        yield passed("partitions", ", ".join(good))
    if (mcs := facts.config.get("MCSPlugin", "")) not in {"", "mcs/none", "(null)"}:
        yield failed("mcs", f"MCSPlugin={mcs} keeps users' jobs apart on nodes", "Share only where MCS is not in use.")


def other_partitions(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Partitions that have shared nodes too and are not ours: their jobs meet sharers."""
    names = {name for node in facts.shared_nodes(config.partitions, config.gpu_models) for name in node.partitions}
    for name in sorted(names - set(config.partitions)):
        partition = facts.partition(name)
        if partition and "SUSPEND" in partition.fields.get("PreemptMode", "").upper():
            yield failed(
                "other-partition",
                f"{name} has shared nodes and preempts by SUSPEND: a suspended sharer keeps its GPU memory",
                "Use another PreemptMode for it, or give it other nodes.",
            )
        elif not facts.release.keeps_whole_gpus_apart:
            yield warned(
                "other-partition",
                f"{name} has shared nodes and is not in Partitions=: Slurm {facts.release} may start its whole-GPU "
                "jobs beside a sharer",
                "Add it to Partitions=: without a token its jobs have their GPUs alone all the same.",
            )
        else:
            yield warned(
                "other-partition",
                f"{name} has shared nodes and is not in Partitions=: its jobs have whole GPUs, with a token too",
                "Add it to Partitions= if its users want to share; else leave it so.",
            )


def defaults_per_gpu(facts: SiteSetup, config: Config) -> Iterator[Finding]:
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
                f"{our_key}",
                f"the partitions' {slurm_key} is not what our settings say",
                f"Run 'gpushare configure --write' again ({our_key}={text}).",
            )


def node_types(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """One type an index, the feature, and all shards there."""
    bad = 0
    shared = facts.shared_nodes(config.partitions, config.gpu_models)
    for node in shared:
        indices, model = range(gpu_count(node)), next(iter(gpu_types([node])), config.gpu_models[0])
        if set(node.gpus.values()) != {f"{model}_{index}" for index in indices}:
            bad += 1
            yield failed(
                "gpu-types",
                f"{node.name}: GPUs are not typed {model}_0, {model}_1, ...",
                "Write one type an index: 'gpushare configure' has the lines. The node must be drained.",
            )
        elif lost := node.lost_shards(config.shards_per_gpu):
            bad += 1
            yield failed(
                "lost-shards",
                f"{node.name}: GPU {lost[0]} has {node.shards_per_gpu.get(lost[0], 0)} of "
                f"{config.shards_per_gpu} shards; jobs for it wait for ever or are refused",
                WITHOUT_SHARDS,
            )
        if model not in node.features:
            bad += 1
            yield failed(
                "node-feature",
                f"{node.name} lacks the feature {model}",
                f"Add Feature={model}: requests for gpu:{model} are turned into it.",
            )
        if gpu_count(node) > config.gpus_per_node:
            bad += 1
            yield failed(
                "gpus-per-node",
                f"{node.name} has {gpu_count(node)} GPUs, our settings say {config.gpus_per_node}",
                f"Run 'gpushare configure --write' again (GpusPerNode={gpu_count(node)}).",
            )
    most = max((gpu_count(node) for node in shared), default=config.gpus_per_node)
    if most < config.gpus_per_node:
        bad += 1
        yield failed(
            "gpus-per-node",
            f"no shared node has more than {most} GPUs, our settings say {config.gpus_per_node}",
            f"Run 'gpushare configure --write' again (GpusPerNode={most}).",
        )
    if not bad:
        others = [node.name for node in facts.gpu_nodes(config.partitions) if node not in shared]
        alone = f"; of other models and left alone: {', '.join(others)}" if others else ""
        yield passed("gpu-types", f"{len(shared)} nodes, one type an index, no shard lost{alone}")


def autodetect(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Detection must be off on shared nodes: for all nodes, or in these nodes' own lines."""
    text = facts.files.get("gres.conf")
    if text is None:
        return  # a configless node has none beside slurm.conf
    shared = facts.shared_nodes(config.partitions, config.gpu_models)
    how = {node.name: current_setup.autodetect(text, node.name) for node in shared}
    if detecting := next((name for name, found in how.items() if found != "off"), None):
        yield failed(
            "autodetect",
            f"gres.conf has AutoDetect={how[detecting]} for {detecting}: it finds other types than those by index",
            "Set AutoDetect=off for the shared nodes and write their devices out.",
        )
    else:
        yield passed("autodetect", "off on shared nodes")


def accounting(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    if facts.limits is None:
        yield warned(
            "accounting", "slurmdbd does not answer: no reports, and limits were not checked", "Start slurmdbd."
        )
    missing = {"gres/gpu", "gres/shard"} - set(facts.words("AccountingStorageTRES"))
    if missing:
        yield failed("accounting-tres", f"AccountingStorageTRES lacks {', '.join(sorted(missing))}", _CONFIGURE)
    else:
        yield passed("accounting-tres", "gres/gpu and gres/shard")
    if typed := _by_model(facts.words("AccountingStorageTRES"), config):
        yield warned(
            "accounting-types",
            f"no job has {typed[0]} where types are by index: its figures stand still",
            "Count gres/gpu and gres/shard instead, and take it out of AccountingStorageTRES.",
        )


def limits(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """A limit or price on GPUs that sharing, or types by index, would slip past."""
    bad = False
    for limit in facts.limits or ():
        typed = _by_model(limit.tres, config)
        if typed or ("gres/gpu" in limit.tres and "gres/shard" not in limit.tres):
            bad = True
            yield failed(
                "limits",
                f"{limit} counts {typed[0]}, which no job has where types are by index"
                if typed
                else f"{limit} counts gres/gpu and not gres/shard: sharing slips past it",
                "Run the sacctmgr line that 'gpushare configure' prints.",
            )
    for name in config.partitions:
        partition = facts.partition(name)
        weights = values.tres(partition.fields.get("TRESBillingWeights", "")) if partition else {}
        if typed := _by_model(weights, config):
            bad = True
            yield failed(
                "billing",
                f"partition {name} bills {typed[0]}, which no job has where types are by index: GPUs are free",
                _CONFIGURE,
            )
        elif _counts_gpus_only(weights):
            bad = True
            yield failed("billing", f"partition {name} bills gres/gpu and not gres/shard: sharing is free", _CONFIGURE)
    priority = values.tres(facts.config.get("PriorityWeightTRES", ""))
    if typed := _by_model(priority, config):
        bad = True
        yield failed(
            "priority",
            f"PriorityWeightTRES counts {typed[0]}, which no job has where types are by index",
            "Count gres/gpu instead, and gres/shard with its share.",
        )
    elif _counts_gpus_only(priority):
        bad = True
        yield failed(
            "priority", "PriorityWeightTRES counts gres/gpu and not gres/shard", "Add gres/shard with its share."
        )
    if not bad:
        yield passed("limits", "every limit and price on GPUs has its equivalent in shards")


def _by_model(names: Iterable[str], config: Config) -> list[str]:
    """Those of TRES `names` that count GPUs of a shared model by its type."""
    models = {f"gres/gpu:{model}".lower() for model in config.gpu_models}
    return [name for name in names if name.lower() in models]


def _counts_gpus_only(tres: dict[str, str]) -> bool:
    names = {name.lower() for name in tres}
    return "gres/gpu" in names and "gres/shard" not in names


def constrain_devices(facts: SiteSetup, _: Config) -> Iterator[Finding]:
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


def clock(facts: SiteSetup, _: Config) -> Iterator[Finding]:
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
    release, select_plugin, gres_types, gangs, partitions, pausing, defaults_per_gpu, node_types, autodetect,
    accounting, limits, other_partitions, constrain_devices, *SCRIPT_CHECKS, clock,
)  # fmt: skip
