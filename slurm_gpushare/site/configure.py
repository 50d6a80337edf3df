"""What a site must write where, worked out from what it has: facts in, texts out, nothing touched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slurm_gpushare.errors import BadInput
from slurm_gpushare.site.facts import Facts, gpu_count, gpu_types, job_defaults
from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.nodes import Node

_ALWAYS_COUNTED = frozenset({"cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"})


class Kind(StrEnum):
    """What to do with a piece."""

    MERGE = "merge"  # lines to work into a file that the site keeps itself
    FILE = "file"  # a whole file, ours
    RUN = "run"  # commands to type


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to write: `name` is relative to slurm.conf's directory, or a systemd unit."""

    name: str
    kind: Kind
    text: str
    executable: bool = False
    source: Path | None = None
    """The package's own file that this is a copy of."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the administrator decided."""

    partitions: tuple[str, ...]
    gpu_model: str
    shards_per_gpu: int


@dataclass(frozen=True, slots=True)
class Install:
    """Where this package is: Slurm's files must name it."""

    python: Path
    lua: Path
    prolog: Path


def choose(facts: Facts, partitions: Sequence[str], gpu_model: str | None, shards_per_gpu: int) -> Choice:
    """The administrator's decision, completed from the site; BadInput where it must be said."""
    with_gpus = [p.name for p in facts.partitions if facts.shared_nodes((p.name,))]
    if unknown := [name for name in partitions if facts.partition(name) is None]:
        raise BadInput(f"no partition '{unknown[0]}'", f"Partitions with GPUs: {', '.join(with_gpus) or 'none'}.")
    if not with_gpus:
        raise BadInput("no partition has a node with GPUs", "Give the nodes Gres=gpu:... in slurm.conf first.")
    if not partitions and len(with_gpus) > 1:
        raise BadInput("several partitions have GPUs", f"Choose with -p: {', '.join(with_gpus)}.")
    chosen = tuple(partitions or with_gpus)
    types = gpu_types(facts.shared_nodes(chosen))
    if gpu_model is None and len(types) > 1:
        raise BadInput(f"the nodes have GPUs of several types: {', '.join(sorted(types))}", "Choose with --gpu-model.")
    return Choice(chosen, gpu_model or next(iter(types), "v100"), shards_per_gpu)


def pieces(facts: Facts, choice: Choice, install: Install) -> list[Piece]:
    """Everything to write, in the order in which to do it."""
    nodes = facts.shared_nodes(choice.partitions)
    found = [
        Piece("gpushare.conf", Kind.FILE, _gpushare_conf(facts, choice, nodes)),
        Piece("slurm.conf", Kind.MERGE, _slurm_conf(facts, choice, nodes)),
        Piece("gres.conf", Kind.MERGE, _gres_conf(facts, choice, nodes)),
        *_lua_files(facts, install),
        *_prologs(install),
    ]
    if commands := _limit_commands(facts, choice):
        found.append(Piece("limits", Kind.RUN, commands))
    return found


def _commented(why: str, line: str) -> str:
    return f"# {why}\n{line}\n"


def _list_with(words: Iterable[str], *wanted: str) -> str:
    kept = list(words)
    return ",".join(kept + [word for word in wanted if word not in kept])


def _grouped(nodes: Sequence[Node]) -> Iterator[tuple[str, int, Node]]:
    """Nodes alike in GPUs and features: their names, how many GPUs each, one of them."""
    groups: dict[tuple[int, tuple[str, ...]], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[gpu_count(node), node.features].append(node)
    for (gpus, _), members in groups.items():
        yield ",".join(node.name for node in members), gpus, members[0]


def _slurm_conf(facts: Facts, choice: Choice, nodes: Sequence[Node]) -> str:
    gres = facts.words("GresTypes")
    tres = [word for word in facts.words("AccountingStorageTRES") if word not in _ALWAYS_COUNTED]
    plugins = [word.removeprefix("job_submit/") for word in facts.words("JobSubmitPlugins")]
    filters = [word.removeprefix("cli_filter/") for word in facts.words("CliFilterPlugins")]
    parts = [
        _commented("Shards are how Slurm counts parts of a GPU.", f"GresTypes={_list_with(gres, 'gpu', 'shard')}"),
        _commented(
            "Reports and limits need both kinds in accounting.",
            f"AccountingStorageTRES={_list_with(tres, 'gres/gpu', 'gres/shard')}",
        ),
        _commented(
            "The submit hook tags jobs; the client filter turns workload names into tokens and lets srun work.",
            f"JobSubmitPlugins={_list_with(plugins, 'lua')}\nCliFilterPlugins={_list_with(filters, 'lua')}",
        ),
        _script(facts, "Prolog", "prolog.d", "Starts the sampler; always exits 0."),
        _script(facts, "Epilog", "epilog.d", "Ends the sampler; always exits 0."),
        _task_prolog(facts),
        _commented(
            "Without Alloc the prolog would only run at the first srun.",
            f"PrologFlags={_list_with(facts.words('PrologFlags'), 'Alloc')}",
        ),
    ]
    if facts.config.get("SelectType") != "select/cons_tres":
        parts.append(_commented("Only cons_tres knows shards.", "SelectType=select/cons_tres"))
    for names, gpus, node in _grouped(nodes):
        types = ",".join(f"gpu:{choice.gpu_model}_{index}:1" for index in range(gpus))
        others = [str(item) for item in node.gres if item.name not in {"gpu", "shard"}]
        wanted = ",".join([types, f"shard:{gpus * choice.shards_per_gpu}", *others])
        parts.append(
            f"# In the NodeName lines of {names}, in place of their Gres= and Feature=: one type an index gives every\n"
            f"# card an address. Types change only on drained nodes; restart slurmctld and the slurmds.\n"
            f"#   Gres={wanted} Feature={_list_with(node.features, choice.gpu_model)}\n"
        )
    parts += list(_billing(facts, choice))
    return "\n".join(parts)


def _script(facts: Facts, key: str, folder: str, why: str) -> str:
    current = ",".join(facts.scripts(key))
    wanted = f"{facts.etc}/{folder}/*"
    if current in {"", wanted}:
        return _commented(why, f"{key}={wanted}")
    return (
        f"# {why}\n# You have {key}={current}: move that script into\n"
        f"# {facts.etc}/{folder}/ so that both run, or call {folder}/50-gpushare from it.\n{key}={wanted}\n"
    )


def _task_prolog(facts: Facts) -> str:
    ours = f"{facts.etc}/gpushare_task_prolog"
    current = ",".join(facts.scripts("TaskProlog"))
    if current in {"", ours}:
        return _commented("Lets plain srun work inside a job that shares its GPU.", f"TaskProlog={ours}")
    return (
        f"# Lets plain srun work inside a job that shares its GPU. Slurm runs one TaskProlog, and yours is\n"
        f"# {current}: add this line to it, so that what ours prints is printed too:\n#   {ours}\n"
    )


def _billing(facts: Facts, choice: Choice) -> Iterator[str]:
    """Billing weights that name GPUs need their shard equivalent, or sharing would be free."""
    for name in choice.partitions:
        partition = facts.partition(name)
        weights = values.tres(partition.fields.get("TRESBillingWeights", "")) if partition else {}
        weight = next((value for key, value in weights.items() if key.lower() == "gres/gpu"), None)
        if weight is not None and not any(key.lower().startswith("gres/shard") for key in weights):
            both = weights | {"GRES/shard": f"{float(weight) / choice.shards_per_gpu:g}"}
            text = ",".join(f"{key}={value}" for key, value in both.items())
            why = f"In the line PartitionName={name}: a shard is 1/{choice.shards_per_gpu} of a GPU."
            yield _commented(why, f"#   TRESBillingWeights={text}")


def _device_settings(gres_conf: str) -> dict[str, str]:
    """Cores= and Links= that the site wrote for single devices, by device file."""
    found = {}
    for line in gres_conf.splitlines():
        words = values.pairs(line.split("#", 1)[0])
        kept = " ".join(f"{key}={value}" for key, value in words.items() if key in {"Cores", "Links"})
        if words.get("Name") == "gpu" and kept:
            found.update(dict.fromkeys(expand(words.get("File", "")), kept))
    return found


def _gres_conf(facts: Facts, choice: Choice, nodes: Sequence[Node]) -> str:
    current = facts.files.get("gres.conf", "")
    settings = _device_settings(current)
    lines = ["# One type an index, written out: a detected type would not match."]
    lines.append("AutoDetect=off")
    if re.search(r"(?im)^\s*AutoDetect\s*=\s*nvml", current) and not settings:
        lines.append(
            "# AutoDetect=nvml also found the cores next to each GPU. Add them as Cores= (nvidia-smi topo -m)."
        )
    for names, gpus, _ in _grouped(nodes):
        for index in range(gpus):
            device = f"/dev/nvidia{index}"
            extra = f" {settings[device]}" if device in settings else ""
            lines.append(f"NodeName={names} Name=gpu Type={choice.gpu_model}_{index} File={device}{extra}")
        lines.append(f"NodeName={names} Name=shard Count={gpus * choice.shards_per_gpu}")
    return "\n".join(lines) + "\n"


def _gpushare_conf(facts: Facts, choice: Choice, nodes: Sequence[Node]) -> str:
    lines = [
        _commented(
            "Jobs of these partitions may share, if their owners say so.", f"Partitions={','.join(choice.partitions)}"
        ),
        _commented("The node feature, and the start of each index's GRES type.", f"GpuModel={choice.gpu_model}"),
        f"GpusPerNode={max((gpu_count(node) for node in nodes), default=1)}\n",
        f"ShardsPerGpu={choice.shards_per_gpu}\n",
        _commented("Change it when Slurm is upgraded: the hook cannot ask.", f"SlurmVersion={facts.release}"),
    ]
    for key, default in (("DefCpuPerGpu", "DefCpuPerGPU"), ("DefMemPerGpu", "DefMemPerGPU")):
        found = [
            f"{name}:{job_defaults(partition)[default]}"
            for name in choice.partitions
            if (partition := facts.partition(name)) and default in job_defaults(partition)
        ]
        if found:
            lines.append(
                _commented(f"The partitions' {default}, which shards do not inherit.", f"{key}={','.join(found)}")
            )
    return "\n".join(lines)


def _lua_files(facts: Facts, install: Install) -> Iterator[Piece]:
    """Our modules; and the entry points, unless the site has its own, which then gets lines to add."""
    for path in sorted(install.lua.glob("*.lua")):
        text = path.read_text(encoding="utf-8")
        own = facts.files.get(path.name)
        if path.name in {"job_submit.lua", "cli_filter.lua"} and own is not None and "gpushare" not in own:
            yield Piece(path.name, Kind.MERGE, _lua_lines(path.name, facts.etc))
        elif own is None or "gpushare" not in own or own == text:
            yield Piece(path.name, Kind.FILE, text, source=path)


def _lua_lines(name: str, etc: Path) -> str:
    if name == "job_submit.lua":
        return (
            f'local gpushare = dofile("{etc}/gpushare.lua")\n'
            "-- at the end of slurm_job_submit(job_desc, part_list, submit_uid), in place of return slurm.SUCCESS:\n"
            "return gpushare.job_submit(job_desc, part_list, submit_uid)\n"
            "-- at the end of slurm_job_modify(job_desc, job_rec, part_list, modify_uid):\n"
            "return gpushare.job_modify(job_desc, job_rec, part_list, modify_uid)\n"
        )
    return (
        f'local gpushare = dofile("{etc}/gpushare_cli.lua")\n'
        "-- at the end of slurm_cli_pre_submit(options, offset), in place of return slurm.SUCCESS:\n"
        "return gpushare.pre_submit(options, offset)\n"
    )


def _prologs(install: Install) -> Iterator[Piece]:
    targets = (
        ("prolog.d/50-gpushare", "prolog.sh"),
        ("epilog.d/50-gpushare", "epilog.sh"),
        ("gpushare_task_prolog", "task_prolog"),
    )
    for name, script in targets:
        text = f"#!/bin/sh\nexport GPUSHARE_PYTHON={install.python}\n{install.prolog / script}\nexit 0\n"
        yield Piece(name, Kind.FILE, text, executable=True)


def _limit_commands(facts: Facts, choice: Choice) -> str:
    """sacctmgr commands that give every limit on GPUs its equivalent in shards."""
    lines = []
    for limit in facts.limits or ():
        gpus = limit.tres.get("gres/gpu")
        if gpus is None or not gpus.isdecimal() or "gres/shard" in limit.tres:
            continue
        entity = "qos" if limit.kind == "qos" else "user" if "user" in limit.owner else "account"
        where = " ".join(f"{'name' if key == entity else key}={value}" for key, value in limit.owner.items())
        shards = int(gpus) * choice.shards_per_gpu
        lines.append(f"sacctmgr modify {entity} where {where} set {limit.name}=gres/shard={shards}")
    return "".join(f"{line}\n" for line in lines)
