"""Limits and prices on GPUs: those that sharing would slip past, and what configure gives in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.site.current_setup import SiteSetup
from slurm_gpushare.site.finding import LINE, Finding, check, failed, passed, warned
from slurm_gpushare.slurm import values


@check("accounting-tres")
def accounting(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """What slurmdbd is told of, without which there is neither a report nor a limit."""
    if facts.limits is None:
        found = "slurmdbd does not answer: no reports, and limits were not checked"
        yield warned(found, "Start slurmdbd.", "accounting")
    if missing := {"gres/gpu", "gres/shard"} - set(facts.words("AccountingStorageTRES")):
        yield failed(f"AccountingStorageTRES lacks {', '.join(sorted(missing))}", LINE)
    else:
        yield passed("gres/gpu and gres/shard")
    if typed := _by_model(facts.words("AccountingStorageTRES"), config):
        yield warned(
            f"no job has {typed[0]} where types are by index: its figures stand still",
            "Count gres/gpu and gres/shard instead, and take it out of AccountingStorageTRES.",
            "accounting-types",
        )


@check("limits", "every limit and price on GPUs has its equivalent in shards")
def limits(facts: SiteSetup, config: Config) -> Iterator[Finding]:
    """A limit or price on GPUs that sharing, or types by index, would slip past."""
    for limit in facts.limits or ():
        if limit.name == _LEAST:
            if "gres/gpu" in limit.tres or _by_model(limit.tres, config):
                found = (
                    f"{limit} wants GPUs of every job, and a job that shares has none in Slurm's books: it is refused"
                )
                yield failed(found, "Take GPUs out of MinTRES there, or give those who share another QOS.")
        elif why := _slips_past(limit.tres, config):
            yield failed(f"{limit} {why}", "Run the sacctmgr line that 'gpushare configure' prints.")
    for name in config.partitions:
        for found in _price_faults(_weights(facts, name), config):
            yield failed(f"partition {name} bills {found}", LINE, "billing")
    for found in _price_faults(values.tres(facts.config.get("PriorityWeightTRES", "")), config):
        fix = "Count gres/gpu, and gres/shard with its share."
        yield failed(f"PriorityWeightTRES counts {found}", fix, "priority")


def _weights(facts: SiteSetup, name: str) -> dict[str, str]:
    partition = facts.partition(name)
    return values.tres(partition.fields.get("TRESBillingWeights", "")) if partition else {}


def _slips_past(tres: Mapping[str, str], config: Config) -> str:
    """Why a limit does not hold for who shares; empty if it does."""
    if typed := _by_model(tres, config):
        return f"counts {typed[0]}, which no job has where types are by index"
    if "gres/gpu" not in tres:
        return ""
    if "gres/shard" not in tres:
        return "counts gres/gpu and not gres/shard: sharing slips past it"
    most = number(tres, "gres/gpu") * config.shards_per_gpu
    too_many = number(tres, "gres/shard") > most
    return f"allows {tres['gres/shard']} shards, {tres['gres/gpu']} GPUs have {most:g}" if too_many else ""


def _price_faults(weights: Mapping[str, str], config: Config) -> Iterator[str]:
    """What is wrong with a price on GPUs: that of a shard must be the card's, divided by its shards."""
    given = {name.lower(): value for name, value in weights.items()}
    whole, part = number(given, "gres/gpu"), number(given, "gres/shard")
    if typed := _by_model(weights, config):
        yield f"{typed[0]}, which no job has where types are by index: GPUs are free"
    elif "gres/gpu" in given and "gres/shard" not in given:
        yield "gres/gpu and not gres/shard: sharing is free"
    elif whole > 0 and abs(part * config.shards_per_gpu - whole) > 0.01 * whole:
        free = ": sharing is free" if part <= 0 else ""
        yield f"a shard at {part:g} and a card at {whole:g}, which is {whole / config.shards_per_gpu:g} a shard{free}"


def _by_model(names: Iterable[str], config: Config) -> list[str]:
    """Those of TRES `names` that count GPUs of a shared model by its type, which no job has any more."""
    models = {f"gres/gpu:{model}".lower() for model in config.gpu_models}
    return [name for name in names if name.lower() in models]


def number(words: Mapping[str, str], name: str) -> float:
    try:
        return float(words.get(name, 0.0))
    except ValueError:
        return 0.0


def billing_lines(facts: SiteSetup, choice: Config) -> Iterator[str]:
    """Billing weights that name GPUs need their shard equivalent, or sharing would be free."""
    for name in choice.partitions:
        weights = _weights(facts, name)
        typed = _by_model(weights, choice)
        ours = {key: value for key, value in weights.items() if key in typed or key.lower() == "gres/gpu"}
        if ours and (typed or "gres/shard" not in map(str.lower, weights)):
            weight = sum(float(value) for value in ours.values())  # Slurm adds up what it bills by name and by type
            others = {key: value for key, value in weights.items() if key not in ours}
            both = {"GRES/gpu": f"{weight:g}", "GRES/shard": f"{weight / choice.shards_per_gpu:g}"}
            text = ",".join(f"{key}={value}" for key, value in (others | both).items())
            why = f"# In the line PartitionName={name}: a shard is 1/{choice.shards_per_gpu} of a GPU."
            yield f"{why}\n#   TRESBillingWeights={text}\n"


def limit_commands(facts: SiteSetup, choice: Config) -> str:
    """sacctmgr commands that give every limit on GPUs its equivalent in shards, and what must be done before them.

    Where types are by index no job has ``gres/gpu:MODEL``: such a limit becomes one on all GPUs.
    """
    lines = []
    for limit in facts.limits or ():
        typed = _by_model(limit.tres, choice)
        counts = [int(limit.tres[name]) for name in ("gres/gpu", *typed) if limit.tres.get(name, "").isdecimal()]
        if not counts or limit.name == _LEAST or ("gres/shard" in limit.tres and not typed):
            continue
        entity = "qos" if limit.kind == "qos" else "user" if "user" in limit.owner else "account"
        where = " ".join(f"{'name' if key == entity else key}={value}" for key, value in limit.owner.items())
        plain = [f"gres/gpu={min(counts)}"] if typed else []
        removed = [f"{name}=-1" for name in typed]
        tres = ",".join([*plain, f"gres/shard={min(counts) * choice.shards_per_gpu}", *removed])
        lines.append(f"sacctmgr modify {entity} where {where} set {limit.name}={tres}")
    if lines and "gres/shard" not in facts.words("AccountingStorageTRES"):
        lines.insert(0, _BEFORE_LIMITS.format(gres=gres_types(facts), tres=counted_tres(facts)))
    return "".join(f"{line}\n" for line in lines)


_BEFORE_LIMITS = """\
# Limits come before sharing. First these two lines alone, on the controller, and a restart of slurmctld: from then on
# sacctmgr knows gres/shard, and no node has a shard yet that anybody could slip past a limit with.
#   GresTypes={gres}
#   AccountingStorageTRES={tres}
# Then these commands, and only then all the rest."""
_LEAST = "MinTRES"
"""What a job must ask for at the least: a sharer has no GPU in Slurm's books, and no equivalent can be said."""
_ALWAYS_COUNTED = frozenset({"cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"})


def gres_types(facts: SiteSetup) -> str:
    """The value of GresTypes that has shards too."""
    return list_with(facts.words("GresTypes"), "gpu", "shard")


def counted_tres(facts: SiteSetup) -> str:
    """The value of AccountingStorageTRES that has both kinds."""
    kept = [word for word in facts.words("AccountingStorageTRES") if word not in _ALWAYS_COUNTED]
    return list_with(kept, "gres/gpu", "gres/shard")


def list_with(words: Iterable[str], *wanted: str) -> str:
    """A comma list with all that is wanted."""
    kept = list(words)
    return ",".join(kept + [word for word in wanted if word not in kept])
