"""``gpushare simulate``: our policy and its peers on the same jobs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from slurm_gpushare import __version__
from slurm_gpushare.cli.output import Column, progress, table
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.errors import BadInput
from slurm_gpushare.knowledge.files import read_profiles
from slurm_gpushare.knowledge.files import replace as replace_file
from slurm_gpushare.simulate.metrics import metrics
from slurm_gpushare.simulate.ours import Options
from slurm_gpushare.simulate.registry import make_policy, parse_policies
from slurm_gpushare.simulate.run import run
from slurm_gpushare.simulate.workload import make_workload, read_rates, read_trace
from slurm_gpushare.simulate.world import World

FILE = click.Path(path_type=Path, dir_okay=False)


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
@click.option("--trace", type=FILE, required=True, help="Jobs: submit_s, duration_s, num_gpus.")
@click.option("--pairs", type=FILE, required=True, help="Measured rates of pairs of profiles.")
@click.option("--profiles", type=FILE, help="Profiles that jobs may have; default: those of --pairs.")
@click.option("--gpus", type=int, required=True, help="Number of GPUs.")
@click.option("--jobs", type=int, help="Only the first so many jobs.")
@click.option("--load", "loads", default="0", callback=_list(float, "--load", 0), help="Offered loads; 0: as traced.")
@click.option("--seed", "seeds", default="0", callback=_list(int, "--seed", 0), help="Seeds, separated by commas.")
@click.option("--policy", "policies", default="all", show_default=True, help="Names, or all; NAME-capNN caps the ISD.")
@click.option("--knowledge", type=click.Choice(["cold", "learned", "oracle"]), default="learned", show_default=True)
@click.option("--durations", type=click.Choice(["known", "limit", "history"]), default="known", show_default=True)
@click.option("--order", type=click.Choice(["priority", "sjf"]), default="priority", show_default=True)
@click.option("--objective", type=click.Choice(["completion", "saving"]), default="completion", show_default=True)
@click.option("--lease", "lease_s", type=click.FloatRange(min=0), default=math.inf,
              help="Jobs that have waited longer take empty GPUs whole: Slurm starts them before the helper looks. "
              "Default: the helper is always first.")  # fmt: skip
@click.option("--multi-gpu", is_flag=True, help="Also take the trace's jobs of several GPUs.")
@click.option("--json", "json_out", type=FILE, help="Write all figures there.")
def simulate(
    trace: Path,
    pairs: Path,
    profiles: Path | None,
    gpus: int,
    jobs: int | None,
    loads: list[float],
    seeds: list[int],
    policies: str,
    knowledge: str,
    durations: str,
    order: str,
    objective: str,
    lease_s: float,
    multi_gpu: bool,
    json_out: Path | None,
) -> None:
    """Run our policy and its peers on the same jobs."""
    names = parse_policies(policies)
    if gpus < 1:
        raise BadInput(f"--gpus {gpus}: at least one is needed")
    if jobs is not None and jobs < 1:
        raise BadInput(f"--jobs {jobs}: at least one is needed")
    if json_out is not None and not json_out.parent.is_dir():
        raise BadInput(f"--json {json_out}: no directory {json_out.parent}", "Make it first.")
    rates = read_rates(pairs, read_profiles(profiles).names if profiles else None)
    jobs_of = read_trace(trace)
    works = [
        (load, make_workload(jobs_of, rates, gpus=gpus, jobs=jobs, load=load, seed=seed, multi_gpu=multi_gpu))
        for load in loads
        for seed in seeds
    ]
    settings = replace(PolicySettings(), extend_time_limit=True, objective=objective)
    options = Options(knowledge, durations, order, settings)
    results: list[dict[str, Any]] = []
    with progress("Simulating", len(names) * sum(work.jobs for _, work in works)) as bar:
        for load, work in works:
            for name in names:
                began = time.perf_counter()
                policy, seen = make_policy(name, work, options)
                figures = metrics(run(seen, policy, bar.update, World(seen, lease_s)))
                wall_s = time.perf_counter() - began
                results.append({"policy": name, "load": load, "seed": work.seed, **figures, "wall_s": wall_s})
    click.echo(_table(results))
    if json_out is not None:
        meta = {
            "version": __version__,
            "gpus": gpus,
            "jobs": works[0][1].jobs,
            "profiles": len(rates.profiles),
            "knowledge": knowledge,
            "durations": durations,
            "order": order,
            "objective": objective,
            "lease_s": lease_s if lease_s < math.inf else None,
            "multi_gpu": multi_gpu,
            "clusters": "terciles of the mean aggressor effect, not telemetry",
        }
        text = json.dumps({"meta": meta, "policies": results}, indent=1, allow_nan=False) + "\n"

        def write(draft: Path) -> None:
            draft.write_text(text, encoding="utf-8")

        replace_file(json_out, write)


def _table(results: list[dict[str, Any]]) -> str:
    base = {(row["load"], row["seed"]): row["avg_jct_s"] for row in results if row["policy"] == "fifo"}
    right = [("LOAD", "g"), ("SEED", "d"), ("AVG_JCT_S", ".0f"), ("OF_FIFO", ".3f"), ("P99_JCT_S", ".0f")]
    right += [("AVG_WAIT_S", ".0f"), ("MAX_WAIT_S", ".0f"), ("PS%", ".1f"), ("ISD%", ".1f"), ("RESIDENT_P99%", ".1f")]
    right += [("GUEST_P99%", ".1f"), ("SHARED", ".2f"), ("WALL_S", ".1f")]
    columns = [Column("POLICY"), *(Column(name, spec, "right") for name, spec in right)]
    keys = ("avg_wait_s", "max_wait_s", "ps_pct", "isd_mean_pct", "resident_isd_p99_pct", "guest_isd_p99_pct")
    rows = []
    for row in results:
        fifo_s = base.get((row["load"], row["seed"]))
        ratio = row["avg_jct_s"] / fifo_s if fifo_s else None
        rows.append(
            [row["policy"], row["load"], row["seed"], row["avg_jct_s"], ratio, row["p99_jct_s"]]
            + [row[key] for key in keys]
            + [row["shared_fraction"], row["wall_s"]]
        )
    return table(columns, rows)
