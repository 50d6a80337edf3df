"""What a site must write where, worked out from what it has: facts in, texts out, nothing touched."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import resource_dir
from slurm_gpushare.protocol.settings import DEFAULTS, KEYS, Config, Place
from slurm_gpushare.site.current_setup import (
    GENERATED,
    Device,
    SiteSetup,
    autodetect,
    devices,
    gpu_count,
    gpu_types,
    job_defaults,
)
from slurm_gpushare.site.limits import billing_lines, counted_tres, gres_types, limit_commands, list_with
from slurm_gpushare.site.site_files import (
    FileKind,
    Piece,
    Setting,
    lua_script,
    merge_settings,
    read_settings,
    without_settings,
)
from slurm_gpushare.slurm.nodes import Node, slurm_user

SUBMIT_BESIDE = "gpushare_submit.lua"
"""Our hook where the site has a job_submit.lua of its own, which runs it."""


def choose(
    facts: SiteSetup, partitions: Sequence[str], gpu_models: Sequence[str], shards_per_gpu: int | None
) -> Config:
    """The administrator's decision, completed from gpushare.conf and the site; BadInput where it must be said."""
    decided = read_settings(facts.files.get("gpushare.conf", ""))
    with_gpus = [p.name for p in facts.partitions if facts.gpu_nodes((p.name,))]
    if unknown := [name for name in partitions if facts.partition(name) is None]:
        raise BadInput(f"no partition '{unknown[0]}'", f"Partitions with GPUs: {', '.join(with_gpus) or 'none'}.")
    if not with_gpus:
        raise BadInput("no partition has a node with GPUs", "Give the nodes Gres=gpu:... in slurm.conf first.")
    before = [name for name in decided.get("partitions", "").split(",") if facts.partition(name)]
    if not partitions and not before and len(with_gpus) > 1:
        raise BadInput("several partitions have GPUs", f"Choose with -p: {', '.join(with_gpus)}.")
    chosen = tuple(partitions or before or with_gpus)
    types = gpu_types(facts.gpu_nodes(chosen))
    decided_models = [name for name in decided.get("gpumodel", "").split(",") if name in types]
    models = tuple(dict.fromkeys(gpu_models or decided_models))
    if not models and len(types) > 1:
        raise BadInput(
            f"the nodes have GPUs of several types: {', '.join(sorted(types))}",
            f"Choose one or several with --gpu-model, e.g. --gpu-model {','.join(sorted(types))}.",
        )
    models = models or (next(iter(types), "v100"),)
    for model, nodes in facts.nodes_by_model(chosen, models).items():
        if not nodes:
            raise BadInput(
                f"no node of {','.join(chosen)} has only GPUs of type {model}",
                f"Choose another --gpu-model; there are: {', '.join(sorted(types))}.",
            )
    shards = shards_per_gpu or int(decided.get("shardspergpu") or 2)
    return replace(DEFAULTS, partitions=chosen, gpu_models=models, shards_per_gpu=shards)


def pieces(facts: SiteSetup, choice: Config) -> list[Piece]:
    """Everything to write, in the order in which to do it."""
    nodes = facts.shared_nodes(choice.partitions, choice.gpu_models)
    limits = limit_commands(facts, choice)
    return [
        *([Piece("limits", FileKind.RUN, limits)] if limits else []),
        Piece("gpushare.conf", FileKind.FILE, _gpushare_conf(facts, choice)),
        Piece(GENERATED, FileKind.FILE, generated_conf(facts, choice, nodes)),
        Piece("slurm.conf", FileKind.MERGE, _slurm_conf(facts, choice, nodes)),
        Piece("gres.conf", FileKind.MERGE, _gres_conf(facts, choice, nodes)),
        *_lua_files(facts, choice),
        *_prologs(facts.etc),
    ]


def _model_of(node: Node, choice: Config) -> str:
    """The model of a shared node's GPUs."""
    return next(iter(gpu_types([node])), choice.gpu_models[0])


def _grouped(nodes: Sequence[Node], choice: Config) -> Iterator[tuple[str, str, int, Node]]:
    """Nodes alike in GPUs and features: their names, their model, how many GPUs each, one of them."""
    groups: dict[tuple[str, int, tuple[str, ...]], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[_model_of(node, choice), gpu_count(node), node.features].append(node)
    for (model, gpus, _), members in groups.items():
        yield ",".join(node.name for node in members), model, gpus, members[0]


def _slurm_conf(facts: SiteSetup, choice: Config, nodes: Sequence[Node]) -> str:
    plugins = [word.removeprefix("job_submit/") for word in facts.words("JobSubmitPlugins")]
    filters = [word.removeprefix("cli_filter/") for word in facts.words("CliFilterPlugins")]
    lines = [
        ("Shards are how Slurm counts parts of a GPU.", f"GresTypes={gres_types(facts)}"),
        ("Reports and limits need both kinds in accounting.", f"AccountingStorageTRES={counted_tres(facts)}"),
        (
            "The submit hook tags jobs; the client filter turns workload names into tokens and lets srun work.",
            f"JobSubmitPlugins={list_with(plugins, 'lua')}\nCliFilterPlugins={list_with(filters, 'lua')}",
        ),
        *((why, _script_line(facts, key, name, beside)) for key, name, _, why, beside in _SCRIPTS),
        (
            "Without Alloc the prolog would only run at the first srun.",
            f"PrologFlags={list_with(facts.words('PrologFlags'), 'Alloc')}",
        ),
    ]
    if facts.config.get("SelectType") != "select/cons_tres":
        lines.append(("Only cons_tres knows shards.", "SelectType=select/cons_tres"))
    parts = [f"# {why}\n{line}\n" for why, line in lines]
    for names, model, gpus, node in _grouped(nodes, choice):
        types = ",".join(f"gpu:{model}_{index}:1" for index in range(gpus))
        others = [str(item) for item in node.gres if item.name not in {"gpu", "shard"}]
        wanted = ",".join([types, f"shard:{gpus * choice.shards_per_gpu}", *others])
        parts.append(
            f"# In the NodeName lines of {names}, in place of their Gres= and Feature=: one type an index gives every\n"
            f"# card an address. Types change only on drained nodes; restart slurmctld and the slurmds.\n"
            f"#   Gres={wanted} Feature={list_with(node.features, model)}\n"
        )
    parts += list(billing_lines(facts, choice))
    return "\n".join(parts)


_MOVE = (
    "# You have {key}={current}: move that script into\n# {folder}/ so that both run, or call 50-gpushare of that\n"
    "# directory from it.\n{key}={ours}"
)
_ADD = "# Slurm runs one {key}, and yours is {current}: add this line to it, "
_SCRIPTS = (
    ("Prolog", "prolog.d/*", "prolog.sh", "Starts the sampler; always exits 0.", _MOVE),
    ("Epilog", "epilog.d/*", "epilog.sh", "Ends the sampler; always exits 0.", _MOVE),
    ("TaskProlog", "gpushare_task_prolog", "task_prolog", "Lets plain srun work inside a job that shares its GPU.",
     _ADD + "so that what ours prints is printed too:\n#   {ours}"),
    ("EpilogSlurmctld", "gpushare_epilog_slurmctld", "epilog_slurmctld.sh",
     "Tells the helper at once that a job has ended. Write the script first: slurmctld may not start without it.",
     _ADD + "before anything that takes long:\n#   {ours}"),
)  # fmt: skip
"""Slurm's key, what it names below slurm.conf's directory, the package's script that this runs, why, and what to do
where the site has a script of its own."""


def _script_line(facts: SiteSetup, key: str, name: str, beside: str) -> str:
    ours, current = f"{facts.etc}/{name}", ",".join(facts.scripts(key))
    if current in {"", ours}:
        return f"{key}={ours}"
    return beside.format(key=key, current=current, ours=ours, folder=ours.removesuffix("/*"))


def _devices(gres_conf: str, node: Node) -> tuple[Device, ...]:
    """The node's GPUs as gres.conf names them; where it does not name all, by NVIDIA's own names."""
    found, count = devices(gres_conf, node.name), gpu_count(node)
    return found if len(found) == count else tuple(Device(f"/dev/nvidia{index}") for index in range(count))


def _gres_conf(facts: SiteSetup, choice: Config, nodes: Sequence[Node]) -> str:
    current = facts.files.get("gres.conf", "")
    cards = {node.name: _devices(current, node) for node in nodes}
    lines = ["# One type an index, written out: a detected type would not match."]
    others = [node for node in facts.nodes if any(gres.name == "gpu" for gres in node.gres) and node not in nodes]
    # Nodes of other models may go on finding theirs by themselves.
    off = " AutoDetect=off" if others else ""
    if not others:
        lines.append("AutoDetect=off")
    detected = any(autodetect(current, name) == "nvml" for name in cards)
    if detected and not any(device.settings for found in cards.values() for device in found):
        lines.append(
            "# AutoDetect=nvml also found the cores next to each GPU. Add them as Cores= (nvidia-smi topo -m)."
        )
    groups: dict[tuple[str, tuple[Device, ...]], list[str]] = defaultdict(list)
    for node in nodes:
        groups[_model_of(node, choice), cards[node.name]].append(node.name)
    for (model, found), names in groups.items():
        node_name = f"NodeName={','.join(names)}{off}"
        for index, device in enumerate(found):
            extra = f" {device.settings}" if device.settings else ""
            lines.append(f"{node_name} Name=gpu Type={model}_{index} File={device.file}{extra}")
        lines.append(f"{node_name} Name=shard Count={len(found) * choice.shards_per_gpu}")
    return "\n".join(lines) + "\n"


def _gpushare_conf(facts: SiteSetup, choice: Config) -> str:
    """The site's own file with our keys brought up to date, or a new one; without what the generated file says now."""
    wanted = [
        Setting(
            "Partitions", ",".join(choice.partitions), "Jobs of these partitions may share, if their owners say so."
        ),
        Setting("GpuModel", ",".join(choice.gpu_models), "The node feature, and the start of each index's GRES type."),
        Setting("ShardsPerGpu", str(choice.shards_per_gpu)),
    ]
    moved = [key.name for key in KEYS if key.place is Place.GENERATED]
    current = facts.files.get("gpushare.conf")
    return merge_settings(without_settings(current, moved) if current else current, wanted)


def generated_conf(facts: SiteSetup, choice: Config, nodes: Sequence[Node]) -> str:
    """What this Slurm says of itself, in a file that nobody edits."""
    said = read_settings(facts.files.get("gpushare.conf", "")) | read_settings(facts.files.get(GENERATED, ""))
    slurmd_user = facts.config.get("SlurmdUser", "").partition("(")[0] or "root"  # of root(0)
    wanted = [
        Setting("SlurmVersion", str(facts.release)),
        Setting("GpusPerNode", str(max((gpu_count(node) for node in nodes), default=1))),
        Setting("SlurmUser", slurm_user(facts.config).name),
        Setting("NodeUsers", list_with(said.get("nodeusers", "root").split(","), slurmd_user)),
    ]
    defaults = {name: job_defaults(part) for name in choice.partitions if (part := facts.partition(name))}
    for key, default in (("DefCpuPerGpu", "DefCpuPerGPU"), ("DefMemPerGpu", "DefMemPerGPU")):
        found = [f"{name}:{given[default]}" for name, given in defaults.items() if default in given]
        wanted.append(Setting(key, ",".join(found)))
    socket = re.search(r"(?:^|,)socket=([^,]+)", facts.config.get("AuthInfo", ""))
    if path := socket[1] if socket else said.get("mungesocket", ""):
        wanted.append(Setting("MungeSocket", path))
    return f"# Written by 'gpushare configure --write'. Do not edit: run it again.\n{''.join(map(str, wanted))}"


def _lua_files(facts: SiteSetup, choice: Config) -> Iterator[Piece]:
    """The entry points, whole; where the site has its own, ours get other names and its script a line to add."""
    models, folder = facts.models_of_nodes(choice.partitions, choice.gpu_models), resource_dir("lua_bridge")
    for name, beside in (("job_submit.lua", SUBMIT_BESIDE), ("cli_filter.lua", "gpushare_client.lua")):
        text = lua_script(folder, name, models)
        own = facts.files.get(name)
        if own is None or (_WRITTEN_BY_US in own and f'"{facts.etc}/{beside}"' not in own):
            yield Piece(name, FileKind.FILE, text, source=folder / name)
        else:
            yield Piece(beside, FileKind.FILE, text, source=folder / name)
            if f'"{facts.etc}/{beside}"' not in own:
                yield Piece(name, FileKind.MERGE, _lua_lines(facts.etc / beside))


# The first words of both scripts.
_WRITTEN_BY_US = "-- slurm-gpushare in "


def _lua_lines(script: Path) -> str:
    return (
        "-- The last lines of your script, but before a 'return' at its end, which Lua lets nothing follow:\n"
        "-- they put our functions after yours.\n"
        f'local gpushare_ready, gpushare_error = pcall(dofile, "{script}")\n'
        'if not gpushare_ready then slurm.log_error("%s", "gpushare: " .. tostring(gpushare_error)) end\n'
    )


def _prologs(etc: Path) -> Iterator[Piece]:
    for _, name, script, *_ in _SCRIPTS:
        # slurmctld need not tell its scripts where its configuration is, and a configless slurmd tells of its cache.
        known = f"export GPUSHARE_PYTHON={sys.executable}\nexport GPUSHARE_CONF={etc}/gpushare.conf\n"
        text = f"#!/bin/sh\n{known}{resource_dir('prolog') / script}\nexit 0\n"
        yield Piece(name.replace("*", "50-gpushare"), FileKind.FILE, text, executable=True)
