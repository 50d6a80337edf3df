"""Our policy beside its peers: the table, the plot and the growth of run time. Needs the measured data sets."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpushare_lab.peers.registry import NAMES, make_policy
from gpushare_lab.peers.trace_jobs import Trace, make_workload, read_any_trace, read_rates

from bench.evaluation_plot import draw, read_table
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.our_policy import Options
from slurm_gpushare.whatif.simulate import run
from slurm_gpushare.whatif.traces import MeasuredPairs
from slurm_gpushare.whatif.world import metrics

LOADS = (0.9, 1.2, 1.5)
SEEDS = (0, 1, 2)
JOBS, GPUS = 8_000, 64
GROWTH = ((5_000, 64), (10_000, 128), (20_000, 256), (39_276, 512))
VARIANTS = {
    "gpushare, cold": Options(knowledge="cold"),
    "gpushare, true rates": Options(knowledge="oracle"),
    "gpushare, limits": Options(durations="limit"),
    "gpushare, history": Options(durations="history"),
    "gpushare, sjf order": Options(order="sjf"),
    "gpushare, saving": Options(settings=PolicySettings(extend_time_limit=True, objective="saving")),
}
Figures = dict[str, Any]


def data_dir() -> Path | None:
    path = Path(os.environ.get("GPUSHARE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    return path if path.is_dir() else None


def simulate(
    trace: Trace, pairs: MeasuredPairs, name: str, options: Options, load: float, seed: int, **size: int
) -> Figures:
    work = make_workload(trace, pairs, load=load, seed=seed, **size)  # type: ignore[arg-type]
    began = time.process_time()
    policy, work = make_policy(name, work, options)
    figures = metrics(run(work, policy))
    return {"load": load, "seed": seed, **figures, "cpu_s": time.process_time() - began}


def compare(trace: Trace, pairs: MeasuredPairs) -> list[Figures]:
    """Every policy and variant at every load, for every seed."""
    results = []
    runs = [(name, name, Options()) for name in NAMES] + [(label, "gpushare", o) for label, o in VARIANTS.items()]
    for label, name, options in runs:
        for load in LOADS:
            for seed in SEEDS:
                figures = simulate(trace, pairs, name, options, load, seed, gpus=GPUS, jobs=JOBS)
                results.append({"policy": label, **figures})
        print(f"  {label}: {sum(row['cpu_s'] for row in results if row['policy'] == label):.0f} s", flush=True)
    fifo = {(row["load"], row["seed"]): row for row in results if row["policy"] == "fifo"}
    for row in results:
        base = fifo[row["load"], row["seed"]]
        row["jct_of_fifo"] = row["avg_jct_s"] / base["avg_jct_s"]
        row["max_wait_of_fifo"] = row["max_wait_s"] / base["max_wait_s"]
    return results


def table(results: list[Figures]) -> str:
    """Average JCT as a part of fifo's (range over seeds), and mean ISD, per policy and load."""
    cells: dict[tuple[str, float], list[Figures]] = defaultdict(list)
    for row in results:
        cells[row["policy"], row["load"]].append(row)
    lines = ["| policy | " + " | ".join(f"JCT at {load:g} | ISD % at {load:g}" for load in LOADS) + " |"]
    lines.append("|---" * (1 + 2 * len(LOADS)) + "|")
    for policy in dict.fromkeys(row["policy"] for row in results):
        text = [policy]
        for load in LOADS:
            jct = [row["jct_of_fifo"] for row in cells[policy, load]]
            isd = statistics.mean(row["isd_mean_pct"] for row in cells[policy, load])
            text += [f"{statistics.mean(jct):.3f} ({min(jct):.3f}–{max(jct):.3f})", f"{isd:.1f}"]
        lines.append("| " + " | ".join(text) + " |")
    return "\n".join(lines) + "\n"


def growth(trace: Trace, pairs: MeasuredPairs) -> list[Figures]:
    results = []
    for jobs, gpus in GROWTH:
        figures = simulate(trace, pairs, "gpushare", Options(), 1.2, 0, gpus=gpus, jobs=jobs)
        results.append({"jobs": jobs, "gpus": gpus, "cpu_s": figures["cpu_s"]})
        print(f"  gpushare, {jobs} jobs on {gpus} GPUs: {figures['cpu_s']:.1f} s of CPU", flush=True)
    return results


def main(out: Path) -> None:
    data = data_dir()
    if data is None:
        print("skipped: no measured data, set GPUSHARE_DATA")
        return
    trace, pairs = read_any_trace(data / "trace_philly_first_half.csv"), read_rates(data / "v100_pairs.csv")
    results = compare(trace, pairs)
    text = table(results)
    print(text)
    (out / "simulate.md").write_text(text)
    title = f"{JOBS:,} jobs of the Philly trace on {GPUS} GPUs, measured V100 pairs: left is better on both sides"
    draw(read_table(text), title, out / "simulate.png")
    document = {"policies": results, "growth": growth(trace, pairs)}
    (out / "simulate.json").write_text(json.dumps(document, indent=1) + "\n")
