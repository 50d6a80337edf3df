"""``gpushare-lab simulate``: our policy and its peers on the same jobs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from gpushare_lab.cli.checks import check_counts
from gpushare_lab.peers.registry import PREEMPTIVE, make_policy, parse_policies
from gpushare_lab.peers.trace_jobs import make_workload, read_any_trace, read_rates
from slurm_gpushare import __version__
from slurm_gpushare.cli.console import FILE, progress, table, warn
from slurm_gpushare.knowledge.interference import Interference, Telemetry, jobs_known
from slurm_gpushare.knowledge.kb import KnowledgeBase, default_kb, telemetry
from slurm_gpushare.knowledge.tables import ProfileTable, read_profiles, write_text
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import check_directory
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.known_durations import DURATION_MODES
from slurm_gpushare.whatif.our_policy import Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MECHANISM, MECHANISMS, SimulatedJobs
from slurm_gpushare.whatif.world import World, metrics, percentile

FIRST_JOBS = 1000
"""So many jobs are reported on their own too: what it is worth before much was learned."""


def _list(kind: Callable[[str], Any], name: str, low: float) -> Callable[..., list[Any]]:
    def parse(_context: click.Context, _parameter: click.Parameter, value: str) -> list[Any]:
        try:
            values = [kind(item) for item in value.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(low <= item < math.inf for item in values):
            raise BadInput(f"{name} {value}: must be numbers from {low:g}, separated by commas")
        return values

    return parse


@click.command()
@click.option("--trace", type=FILE, required=True, help="Jobs: submit_s, duration_s, num_gpus; or as published.")
@click.option("--pairs", type=FILE, required=True, help="Measured rates of pairs of profiles.")
@click.option("--profiles", type=FILE, help="Profiles that jobs may have; default: those of --pairs.")
@click.option("--kb", "kb_file", type=FILE, help="Start from this knowledge base and the telemetry of --profiles.")
@click.option("--gpus", type=int, required=True, help="Number of GPUs.")
@click.option("--jobs", type=int, help="Only the first so many jobs.")
@click.option("--load", "loads", default="0", callback=_list(float, "--load", 0), help="Offered loads; 0: as traced.")
@click.option("--seed", "seeds", default="0", callback=_list(int, "--seed", 0), help="Seeds, separated by commas.")
@click.option("--policy", "policies", default="all", show_default=True, help="Names, or all; NAME-capNN caps the ISD.")
@click.option("--knowledge", type=click.Choice(["cold", "telemetry", "learned", "oracle"]), default="learned",
              show_default=True, help="What our policy knows: cold only the mean, telemetry what it tells, learned "
              "also what is seen meanwhile, oracle the rates themselves.")  # fmt: skip
@click.option("--durations", type=click.Choice(DURATION_MODES), default="known", show_default=True,
              help="What our policy knows of durations: known the truth, limit only time limits (1 to 5 times the "
              "truth), history also the earlier runs of the profile, none nothing.")  # fmt: skip
@click.option("--order", type=click.Choice(["priority", "sjf"]), default="priority", show_default=True,
              help="Who gets whole GPUs first under our policy: priority by submission, sjf the shortest "
              "expected.")  # fmt: skip
@click.option("--objective", type=click.Choice(["completion", "saving"]), default="completion", show_default=True,
              help="What our policy shares for: completion that jobs end sooner, saving less GPU time (Objective of "
              "gpushare.conf).")  # fmt: skip
@click.option("--lease", "lease_s", type=click.FloatRange(min=0), default=math.inf,
              help="Jobs that have waited longer take empty GPUs whole: Slurm starts them before the helper looks. "
              "Default: the helper is always first.")  # fmt: skip
@click.option("--multi-gpu", is_flag=True, help="Also take the trace's jobs of several GPUs.")
@click.option("--gpus-per-node", type=click.IntRange(min=2), default=None,
              help="GPUs are on nodes of so many; with --multi-gpu two jobs of as many share a node.")  # fmt: skip
@click.option("--no-gangs", is_flag=True, help="Jobs of several GPUs never share.")
@click.option(
    "--mechanism",
    type=click.Choice(MECHANISMS),
    default=MECHANISMS[0],
    show_default=True,
    help="slices: take --pairs as measured under MPS, and scale them to time slices; mps: the other way.",
)
@click.option("--json", "json_out", type=FILE, help="Write all figures there.")
def simulate(
    trace: Path, pairs: Path, profiles: Path | None, kb_file: Path | None, gpus: int, jobs: int | None,
    loads: list[float], seeds: list[int], policies: str, knowledge: str, durations: str, order: str, objective: str,
    lease_s: float, multi_gpu: bool, gpus_per_node: int | None, no_gangs: bool, mechanism: str,
    json_out: Path | None,
) -> None:  # fmt: skip
    """Run our policy and its peers on the same jobs."""
    names = _names(policies, gpus_per_node)
    check_counts(gpus, jobs)
    check_directory("--json", json_out)
    described = read_profiles(profiles) if profiles else None
    rates = read_rates(pairs, described.names if described else None).under(mechanism)
    jobs_of = read_any_trace(trace)
    works = [
        (load, make_workload(jobs_of, rates, gpus=gpus, jobs=jobs, load=load, seed=seed, multi_gpu=multi_gpu,
                             gpus_per_node=gpus_per_node or 0))
        for load in loads
        for seed in seeds
    ]  # fmt: skip
    settings = replace(PolicySettings(), objective=objective)
    told = _start(knowledge, kb_file, described, rates.profiles)
    options = Options(knowledge, durations, order, settings, *told, share_gangs=not no_gangs)
    results = _run_each(names, works, options, lease_s)
    click.echo(_table(results))
    if json_out is not None:
        meta = {
            "version": __version__, "gpus": gpus, "jobs": works[0][1].jobs, "profiles": len(rates.profiles),
            "knowledge": knowledge, "durations": durations, "order": order, "objective": objective,
            "lease_s": lease_s if lease_s < math.inf else None, "multi_gpu": multi_gpu, "gpus_per_node": gpus_per_node,
            "share_gangs": bool(gpus_per_node) and multi_gpu and not no_gangs,
            "gang_rates": "those measured for pairs of single-GPU jobs: nobody has measured gangs",
            "knowledge_from": _told(options, kb_file),
            "mechanism": MECHANISM if mechanism == "as-measured" else f"scaled to {mechanism}",
            "clusters": "terciles of the mean aggressor effect, not telemetry",
        }  # fmt: skip
        write_text(json_out, json.dumps({"meta": meta, "policies": results}, indent=1, allow_nan=False) + "\n")


def _names(policies: str, gpus_per_node: int | None) -> list[str]:
    """The policies to run; on nodes only those that know nodes."""
    names = parse_policies(policies)
    if gpus_per_node and policies == "all":
        return [name for name in names if name not in PREEMPTIVE]
    if gpus_per_node and (moving := sorted({*names} & {*PREEMPTIVE})):
        raise BadInput(f"--gpus-per-node: {moving[0]} moves jobs at will and knows no nodes", "Leave it out.")
    return names


def _run_each(
    names: Sequence[str], works: Sequence[tuple[float, SimulatedJobs]], options: Options, lease_s: float
) -> list[dict[str, Any]]:
    """The figures of every policy on every workload, each given with its load."""
    results: list[dict[str, Any]] = []
    with progress("Simulating", len(names) * sum(work.jobs for _, work in works)) as bar:
        for load, work in works:
            for name in names:
                began = time.perf_counter()
                policy, seen = make_policy(name, work, options)
                figures = metrics(world := run(seen, policy, bar.update, World(seen, lease_s)))
                wall_s = time.perf_counter() - began
                results.append(
                    {"policy": name, "load": load, "seed": work.seed, **figures, "wall_s": wall_s}
                    | {"first": first_metrics(world, FIRST_JOBS)}
                )
    return results


def _start(
    knowledge: str, kb_file: Path | None, profiles: ProfileTable | None, names: Sequence[str]
) -> tuple[Interference | None, Telemetry | None]:
    """The knowledge base and the telemetry, in the order of `names`, that our policy starts from."""
    if kb_file is None and knowledge != "telemetry":
        return None, None
    if profiles is None:
        raise BadInput("telemetry to start from", "Give --profiles with it.")
    order = [profiles.names.index(name) for name in names]
    jobs = telemetry(profiles.take(order))
    if not jobs_known(jobs).any():
        raise BadInput("--profiles: no telemetry in it", "gpu_util_mean_pct and mem_access_mean_pct are needed.")
    base = KnowledgeBase.load(kb_file) if kb_file else default_kb()
    if base.gpu_model.lower() != profiles.gpu_model.lower():
        warn(f"profiles of {profiles.gpu_model}, knowledge of {base.gpu_model}: only telemetry is common to both")
    return base.interference, jobs


def _told(options: Options, kb_file: Path | None) -> str:
    if options.telemetry is None or options.knowledge in ("cold", "oracle"):
        return "the mean of the shipped base" if options.knowledge != "oracle" else "the rates themselves"
    return f"telemetry and {kb_file.name if kb_file else 'the shipped base'}"


def _table(results: list[dict[str, Any]]) -> str:
    base = {(row["load"], row["seed"]): row["avg_jct_s"] for row in results if row["policy"] == "fifo"}
    numbers = [("LOAD", "g"), ("SEED", "d"), ("AVG_JCT_S", ".0f"), ("OF_FIFO", ".3f"), ("P99_JCT_S", ".0f")]
    numbers += [("AVG_WAIT_S", ".0f"), ("MAX_WAIT_S", ".0f"), ("PS%", ".1f"), ("ISD%", ".1f"), ("RESIDENT_P99%", ".1f")]
    numbers += [("GUEST_P99%", ".1f"), ("SHARED", ".2f"), ("1ST_JCT_S", ".0f"), ("1ST_ISD%", ".1f"), ("WALL_S", ".1f")]
    columns = ["POLICY", *(f"{name}>{spec}" for name, spec in numbers)]
    keys = ("avg_wait_s", "max_wait_s", "ps_pct", "isd_mean_pct", "resident_isd_p99_pct", "guest_isd_p99_pct")
    rows = []
    for row in results:
        fifo_s = base.get((row["load"], row["seed"]))
        ratio = row["avg_jct_s"] / fifo_s if fifo_s else None
        rows.append(
            [row["policy"], row["load"], row["seed"], row["avg_jct_s"], ratio, row["p99_jct_s"]]
            + [row[key] for key in keys]
            + [row["shared_fraction"], row["first"]["avg_jct_s"], row["first"]["isd_mean_pct"], row["wall_s"]]
        )
    return table(columns, rows)


def first_metrics(world: World, count: int) -> dict[str, float]:
    """The figures of the first so many jobs of a run: what it was worth before much was learned."""
    work = world.work
    jct_s = (world.end_s - work.submit_s)[:count]
    ran_s, alone_s = world.ran_s[:count], work.duration_s[:count]
    isd_pct = np.maximum((ran_s / alone_s - 1) * 100, 0.0)
    return {
        "jobs": len(jct_s),
        "avg_jct_s": float(jct_s.mean()),
        "avg_wait_s": float((jct_s - ran_s).mean()),
        "isd_mean_pct": float(isd_pct.mean()),
        "isd_p95_pct": percentile(isd_pct, 95),
        "shared_fraction": float(world.shared[:count].mean()),
    }
