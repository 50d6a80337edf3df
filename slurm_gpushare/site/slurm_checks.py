"""Doctor's checks of Slurm's configuration and nodes: pure functions of the site's facts and our settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from slurm_gpushare.protocol.release import Release
from slurm_gpushare.protocol.settings import KEYS, Config, parse_config
from slurm_gpushare.site import current_setup
from slurm_gpushare.site.configure import generated_conf
from slurm_gpushare.site.current_setup import SiteSetup, gpu_count, gpu_types
from slurm_gpushare.site.finding import Check, Finding, check, failed, passed, warned
from slurm_gpushare.site.limits import accounting, limits, number
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.nodes import (
    WITHOUT_SHARDS,
    Node,
    Partition,
    missing_for_gangs,
    slurm_user,
)

_CLOCK_SLACK_S = 5.0
_SLOW_S = 60.0
"""Slurm's own intervals of scheduling are shorter; a job that we placed waits for the next pass."""


@check("slurm-release")
def release(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Known bugs of the release, and settings that an earlier one of ours had."""
    if facts.release < Release(22, 5):
        yield failed(f"Slurm {facts.release} is older than 22.05", "Upgrade; 23.11.5 or newer is best.")
    elif not facts.release.can("keeps_whole_gpus_apart"):
        yield warned(
            f"Slurm {facts.release}: whole-GPU jobs may start beside a sharer; a restart of slurmctld loses shards; "
            "a job keeps the GPU index that it got at submission, so fewer can share "
            "(0.58 of the jobs instead of 0.74 in a replay; docs/evaluation.md)",
            "Upgrade to 23.11.5 or newer. Until then the hook turns single-GPU requests into all shards of a GPU; "
            "do not restart slurmctld while jobs share.",
        )
    else:
        yield passed(f"Slurm {facts.release}")
    for warning in config.warnings:
        yield warned(warning, "Run 'gpushare configure --write', or take the line out.", "settings")


@check("generated", "what Slurm says of itself is in our settings")
def generated(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """The hook and the nodes cannot ask Slurm: what configure wrote down for them must still be so."""
    nodes = facts.shared_nodes(config.partitions, config.gpu_models)
    here = parse_config(generated_conf(facts, config, nodes))
    same_user = config.slurm_user in {str(slurm_user(facts.config).uid), here.slurm_user}
    asked = _ASKED_OF_SLURM - ({"slurm_user"} if same_user else set()) - ({"gpus_per_node"} if not nodes else set())
    for key in KEYS:
        now, told = getattr(here, key.attribute), getattr(config, key.attribute)
        if key.attribute in asked and now != told:
            loss = ": no job is converted" if key.attribute == "slurm_version" else ""
            found = f"{key.name} is {_value(told)} in our settings, Slurm says {_value(now)}{loss}"
            yield failed(found, "Run 'gpushare configure --write' again, and copy the file to the nodes.", key.name)


_ASKED_OF_SLURM = frozenset({"slurm_version", "gpus_per_node", "slurm_user", "def_cpu_per_gpu", "def_mem_per_gpu_mib"})


def _value(value: object) -> str:
    """A setting as it is written in gpushare.conf."""
    if isinstance(value, Mapping):
        value = ",".join(f"{name}:{number}" for name, number in value.items())
    return str(value) or "nothing"


@check("job-comment")
def job_comment(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Accounting that keeps users' comments keeps the tokens in them, for ever."""
    if "job_comment" in facts.config.get("AccountingStoreFlags", "").lower():
        found = "AccountingStoreFlags=job_comment: whoever may see a job in sacct links all runs of a token, for ever"
        yield warned(found, "Take it out unless other tools need it; PrivateData=jobs hides jobs (docs/privacy.md).")


@check("select-plugin", "cons_tres, which knows shards, and counts memory")
def select_plugin(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Shards are cons_tres's; and where memory is not counted a node takes jobs until it has none left."""
    if (found := facts.config.get("SelectType", "")) != "select/cons_tres":
        yield failed(f"SelectType={found} knows no shards", "Set SelectType=select/cons_tres.")
    if "MEMORY" not in (counted := facts.config.get("SelectTypeParameters", "").upper()):
        yield warned(
            f"SelectTypeParameters={counted or 'nothing'} does not count memory: more jobs share a node's memory now, "
            "and nothing keeps them from using it up",
            "Set SelectTypeParameters=CR_Core_Memory (or CR_CPU_Memory), and DefMemPerCPU.",
        )


@check("gangs", "not wanted: ShareGangs=no")
def gangs(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Whether two jobs that each want a whole node can share it, where that is wanted."""
    if not config.share_gangs:
        return
    if not facts.release.can("keeps_whole_gpus_apart"):
        found = f"ShareGangs=yes, but Slurm {facts.release} cannot"
        yield failed(found, "Upgrade to 23.11.5 or newer, or set it to no.")
    elif missing := missing_for_gangs(facts.config):
        yield failed(
            f"ShareGangs=yes, but SelectTypeParameters lacks {', '.join(missing)}",
            "Add that in slurm.conf and restart slurmctld. Until then jobs that want a whole node run as written.",
        )
    else:
        yield passed(f"jobs that want all {config.gpus_per_node} GPUs of a node may share it")


@check("gres-types", "gpu and shard")
def gres_types(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    if missing := {"gpu", "shard"} - set(facts.words("GresTypes")):
        yield failed(f"GresTypes lacks {', '.join(sorted(missing))}", "Set GresTypes=gpu,shard.")


@check("pausing")
def pausing(_: SiteSetup, config: Config) -> Iterator[Finding]:
    """Whether promises are kept by pausing, and how much of it there may be."""
    if config.on_slowdown != "pause":
        yield passed(f"not wanted: OnSlowdown={config.on_slowdown}")
    else:
        yield passed(f"at most 5 minutes at a time, {config.pause_most_pct:g} % in all")


@check("preemption")
def preemption(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """What happens to sharers whom Slurm preempts."""
    mode, by = facts.config.get("PreemptMode", "OFF").upper(), facts.config.get("PreemptType", "")
    if {"SUSPEND", "GANG"} & set(mode.split(",")):
        yield failed(
            f"PreemptMode={mode}: a suspended sharer keeps its GPU memory, and its neighbour's card is not free",
            "Set PreemptMode=REQUEUE (or CANCEL) for the cluster, and for partitions that preempt.",
        )
    elif by in {"", "(null)", "preempt/none"} or mode == "OFF":
        yield passed("nobody is preempted")
    else:
        yield passed(f"{by}, PreemptMode={mode}: where Slurm leaves a card shared, the helper frees it by these rules")


@check("scheduler", "a placed job is looked at within a minute")
def scheduler(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """How soon Slurm starts what we place."""
    words = (word.partition("=") for word in facts.words("SchedulerParameters"))
    given = {name: value for name, _, value in words}
    slow = [f"{name}={given[name]}" for name in ("sched_interval", "bf_interval") if number(given, name) > _SLOW_S]
    slow += ["defer"] if {"defer", "defer_batch"} & given.keys() else []
    if number(given, "sched_min_interval") > _SLOW_S * 1e6 / 6:  # in microseconds
        slow.append(f"sched_min_interval={given['sched_min_interval']}")
    if slow:
        yield warned(
            f"SchedulerParameters has {', '.join(slow)}: jobs that were placed start only at Slurm's next pass, and "
            "their cards stand half empty until then",
            "Use the defaults (sched_interval=60, bf_interval=30, no defer), or shorter ones.",
        )


@check("partitions")
def partitions(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """The partitions exist, and none has what we leave alone."""
    if not config.partitions:
        yield failed("gpushare.conf names no partition: nothing is shared", "Set Partitions=.")
    bad = [fault for name in config.partitions for fault in _partition_faults(facts, name, config)]
    yield from bad
    if config.partitions and not bad:
        yield passed(", ".join(config.partitions))
    if (mcs := facts.config.get("MCSPlugin", "")) not in {"", "mcs/none", "(null)"}:
        yield failed(f"MCSPlugin={mcs} keeps users' jobs apart on nodes", "Share only where MCS is not in use.", "mcs")


def _partition_faults(facts: SiteSetup, name: str, config: Config) -> Iterator[Finding]:
    partition = facts.partition(name)
    if partition is None:
        yield failed(f"there is no partition {name}", "Correct Partitions= in gpushare.conf.")
        return
    if "SUSPEND" in _field(partition, "PreemptMode"):
        found = f"{name} preempts by SUSPEND: a suspended job keeps its GPU memory"
        yield failed(found, "Use another PreemptMode, or take it out of Partitions=.")
    if _field(partition, "ExclusiveUser") == "YES":
        yield failed(f"{name} has ExclusiveUser=YES", "Take it out of Partitions=.")
    over = _field(partition, "OverSubscribe")
    if over.startswith("FORCE") and over != "FORCE:1":
        yield failed(
            f"{name} has OverSubscribe={over}: Slurm puts several jobs on the same CPUs, and what is measured of one "
            "is the others' doing",
            f"Set OverSubscribe=NO (or FORCE:1) in the line PartitionName={name}.",
        )
    elif over == "EXCLUSIVE":
        yield failed(f"{name} gives whole nodes (OverSubscribe=EXCLUSIVE): nobody can share", "Set OverSubscribe=NO.")
    if not facts.shared_nodes((name,), config.gpu_models):
        found = f"{name} has no node with {' or '.join(config.gpu_models)} GPUs"
        yield failed(found, "Correct Partitions= in gpushare.conf.")


def _field(partition: Partition | None, name: str) -> str:
    return partition.fields.get(name, "").upper() if partition else ""


@check("other-partition")
def other_partitions(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Partitions that have shared nodes too and are not ours: their jobs meet sharers."""
    names = {name for node in facts.shared_nodes(config.partitions, config.gpu_models) for name in node.partitions}
    for name in sorted(names - set(config.partitions)):
        if "SUSPEND" in _field(facts.partition(name), "PreemptMode"):
            yield failed(
                f"{name} has shared nodes and preempts by SUSPEND: a suspended sharer keeps its GPU memory",
                "Use another PreemptMode for it, or give it other nodes.",
            )
        elif not facts.release.can("keeps_whole_gpus_apart"):
            yield warned(
                f"{name} has shared nodes and is not in Partitions=: Slurm {facts.release} may start its whole-GPU "
                "jobs beside a sharer",
                "Add it to Partitions=: without a token its jobs have their GPUs alone all the same.",
            )
        else:
            yield warned(
                f"{name} has shared nodes and is not in Partitions=: its jobs have whole GPUs, with a token too",
                "Add it to Partitions= if its users want to share; else leave it so.",
            )


@check("gpu-types")
def node_types(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """One type an index, the feature, and all shards there."""
    shared = facts.shared_nodes(config.partitions, config.gpu_models)
    bad = [fault for node in shared for fault in _node_faults(node, config)]
    yield from bad
    if not bad:
        others = [node.name for node in facts.gpu_nodes(config.partitions) if node not in shared]
        alone = f"; of other models and left alone: {', '.join(others)}" if others else ""
        yield passed(f"{len(shared)} nodes, one type an index, no shard lost{alone}")


def _node_faults(node: Node, config: Config) -> Iterator[Finding]:
    model, each = next(iter(gpu_types([node])), config.gpu_models[0]), config.shards_per_gpu
    if set(node.gpus.values()) != {f"{model}_{index}" for index in range(gpu_count(node))}:
        found = f"{node.name}: GPUs are not typed {model}_0, {model}_1, ..."
        fix = "Write one type an index: 'gpushare configure' has the lines. The node must be drained."
        yield failed(found, fix)
    elif lost := node.lost_shards(each):
        has = node.shards_per_gpu.get(lost[0], 0)
        found = f"{node.name}: GPU {lost[0]} has {has} of {each} shards; jobs for it wait for ever or are refused"
        yield failed(found, WITHOUT_SHARDS, "lost-shards")
    elif more := [index for index, shards in node.shards_per_gpu.items() if shards > each]:
        yield failed(
            f"{node.name}: GPU {more[0]} has {node.shards_per_gpu[more[0]]} shards, gpushare.conf says {each}: "
            "'all shards' is not the whole card there",
            f"Give that node Count={each * gpu_count(node)} in gres.conf's shard line and shard:"
            f"{each * gpu_count(node)} in slurm.conf; restart slurmctld, then its slurmd.",
            "shards",
        )
    if model not in node.features:
        found = f"{node.name} lacks the feature {model}"
        yield failed(found, f"Add Feature={model}: requests for gpu:{model} are turned into it.", "node-feature")


_SAVING = frozenset({"powered_down", "powering_down", "powering_up", "power_down", "power_up", "future", "maint"})


@check("nodes", "every shared node answers")
def node_states(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Nodes that start nothing. A slurmd that dies of gres.conf looks like a node that is switched off."""
    shared = facts.shared_nodes(config.partitions, config.gpu_models)
    out = [node for node in shared if not node.usable and not node.states & _SAVING]
    for node in out:
        why = facts.reasons.get(node.name, "Slurm gives no reason")
        drained = bool(node.states & {"drain", "drained", "draining"}) and node.responding
        found = f"{node.name} is {'+'.join(sorted(node.states))} ({why}): none of its cards is shared"
        if re.search("gres|gpu|shard", why, re.IGNORECASE) or len(out) == len(shared):
            yield failed(found, _SLURMD)
        else:
            yield warned(found, f"Run 'scontrol update NodeName={node.name} State=RESUME'." if drained else _SLURMD)


_SLURMD = (
    "See the end of slurmd's log there ('slurmd -G' prints what it makes of gres.conf): slurm.conf and gres.conf must "
    "be the same on all machines and agree on types and shards. Then restart slurmd, and resume the node."
)


@check("autodetect", "off on shared nodes")
def autodetect(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """Detection must be off on shared nodes: for all nodes, or in these nodes' own lines."""
    text = facts.files.get("gres.conf", "AutoDetect=off")  # a configless node has none beside slurm.conf
    for node in facts.shared_nodes(config.partitions, config.gpu_models):
        if (how := current_setup.autodetect(text, node.name)) != "off":
            yield failed(
                f"gres.conf has AutoDetect={how} for {node.name}: it finds other types than those by index",
                "Set AutoDetect=off for the shared nodes and write their devices out.",
            )
            return


@check("constrain-devices", "jobs see only their own GPUs")
def constrain_devices(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    constrained = re.search(r"(?im)^\s*ConstrainDevices\s*=\s*yes", facts.files.get("cgroup.conf", ""))
    if not constrained or "cgroup" not in facts.config.get("TaskPlugin", ""):
        yield warned(
            "a job that overwrites CUDA_VISIBLE_DEVICES reaches other jobs' GPUs",
            "Set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup.",
        )


@check("constrain-memory")
def constrain_memory(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Slurm 26.11 on: a job's shards would bound its GPU memory, and every sharer has half of them."""
    if re.search(r"(?im)^\s*ConstrainDeviceMemory\s*=\s*yes", facts.files.get("cgroup.conf", "")):
        yield failed(
            "ConstrainDeviceMemory=yes holds each sharing job to half of a card's memory, alone or not: one that needs"
            " more dies, though its peak and its neighbour's fit together",
            "Set ConstrainDeviceMemory=no in cgroup.conf on nodes that share.",
        )


@check("clock", "agrees with slurmctld's")
def clock(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Leases and heartbeats compare times of controller and nodes."""
    told = values.integer(facts.config.get("as_of", ""))
    off_s = 0.0 if told is None else abs(facts.asked_s - told)
    if off_s > _CLOCK_SLACK_S:
        yield failed(f"this machine and slurmctld are {off_s:.0f} s apart", "Run chrony or ntpd on both.")


@check("jobstats", "nobody else writes AdminComment when a job ends")
def jobstats(facts: SiteSetup, _: Config) -> Iterator[Finding]:
    """Both may run; who looks for our tag in accounting should know why it is not there."""
    if "jobstats" in facts.config.get("EpilogSlurmctld", "").lower():
        yield warned(
            "jobstats replaces AdminComment when a job ends",
            "Nothing is lost: reports go by the store. docs/report.md says how to run both.",
        )


SLURM_CHECKS: tuple[Check, ...] = (
    release, generated, select_plugin, gres_types, gangs, partitions, preemption, pausing, scheduler, node_types,
    node_states, autodetect, accounting, limits, other_partitions, constrain_devices, constrain_memory, job_comment,
    clock, jobstats,
)  # fmt: skip
