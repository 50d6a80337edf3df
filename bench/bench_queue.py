"""The whole queue: its tail over many seeds, other parts of the trace, unknown durations, gangs. Needs the data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gpushare_lab.peers.trace_jobs import Trace, read_any_trace, read_rates

from bench.bench_simulate import GPUS, JOBS, LOADS, Figures, data_dir, simulate
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.whatif.our_policy import Options
from slurm_gpushare.whatif.traces import MeasuredPairs

SAVING = Options(settings=PolicySettings(extend_time_limit=True, objective="saving"))
PEERS = ("sjf-bsbf", "lucid-tertile", "gpushare")
SEEDS = range(9)
SLICES = (8_000, 15_000, 25_000, 31_000)
COLUMNS = {
    "avg_jct_s": "JCT", "p99_jct_s": "p99", "max_wait_s": "longest wait", "ps_pct": "PS %", "isd_mean_pct": "ISD %",
    "resident_isd_p99_pct": "p99 of residents' ISD %", "guest_isd_p99_pct": "of guests'",
}  # fmt: skip
OF_FIFO = ("avg_jct_s", "p99_jct_s", "max_wait_s")


def of_fifo(figures: Figures, fifo: Figures) -> Figures:
    return figures | {name: figures[name] / fifo[name] for name in OF_FIFO}


def table(first: Iterable[str], rows: Iterable[tuple[Iterable[object], Figures]]) -> str:
    head = [*first, *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for names, figures in rows:
        cells = [f"{figures[name]:.3f}" if name in OF_FIFO else f"{figures[name]:.1f}" for name in COLUMNS]
        lines.append("| " + " | ".join([*map(str, names), *cells]) + " |")
    return "\n".join(lines) + "\n"


def mean(rows: list[Figures]) -> Figures:
    return {name: statistics.fmean(row[name] for row in rows) for name in COLUMNS}


def part(trace: Trace, first: int) -> Trace:
    """The trace's single-GPU jobs from number `first` on."""
    single = trace.num_gpus == 1
    return Trace(*(column[single][first:] for column in (trace.submit_s, trace.duration_s, trace.num_gpus)))


def tail(trace: Trace, pairs: MeasuredPairs) -> str:
    """Load 1.2, the mean of few and of many seeds, and how far one seed is from it."""
    size = {"gpus": GPUS, "jobs": JOBS}
    rows = []
    for name in PEERS:
        seeds = [
            of_fifo(
                simulate(trace, pairs, name, Options(), 1.2, seed, **size),
                simulate(trace, pairs, "fifo", Options(), 1.2, seed, **size),
            )
            for seed in SEEDS
        ]
        rows += [((name, "0 to 2"), mean(seeds[:3])), ((name, "0 to 8"), mean(seeds))]
        spread = {column: statistics.stdev(row[column] for row in seeds) for column in COLUMNS}
        rows.append(((name, "one seed is off by"), spread))
    return table(("policy", "seeds"), rows)


def slices(trace: Trace, pairs: MeasuredPairs) -> str:
    rows = []
    for first in SLICES:
        some = part(trace, first)
        for load in LOADS:
            size = {"gpus": GPUS, "jobs": JOBS}
            fifo = simulate(some, pairs, "fifo", Options(), load, 0, **size)
            for name in PEERS:
                figures = of_fifo(simulate(some, pairs, name, Options(), load, 0, **size), fifo)
                rows.append(((f"{first:,}", load, name), figures))
    return table(("from job", "load", "policy"), rows)


def unknown(trace: Trace, pairs: MeasuredPairs) -> str:
    rows = []
    for load in LOADS:
        size = {"gpus": GPUS, "jobs": JOBS}
        fifo = simulate(trace, pairs, "fifo", Options(), load, 0, **size)
        for name in ("tiresias", "gpushare"):
            figures = simulate(trace, pairs, name, Options(durations="none"), load, 0, **size)
            rows.append(((name, load), of_fifo(figures, fifo)))
    return table(("policy, durations unknown", "load"), rows)


def gangs(trace: Trace, pairs: MeasuredPairs) -> str:
    """Jobs of any width on 32 nodes of 8; rates of gangs are those measured for single cards, a stand-in."""
    size = {"gpus": 256, "gpus_per_node": 8, "multi_gpu": 1, "jobs": JOBS}
    fifo = simulate(trace, pairs, "fifo", Options(), 1.2, 0, **size)
    variants = {
        "without gangs": Options(),
        "with gangs": Options(share_gangs=True),
        "saving, without gangs": SAVING,
        "saving, with gangs": replace(SAVING, share_gangs=True),
    }
    runs = {name: simulate(trace, pairs, "gpushare", options, 1.2, 0, **size) for name, options in variants.items()}
    return table(("jobs of any width",), [((name,), of_fifo(figures, fifo)) for name, figures in runs.items()])


def main(out: Path) -> None:
    data = data_dir()
    if data is None:
        print("skipped: no measured data, set GPUSHARE_DATA")
        return
    trace, pairs = read_any_trace(data / "trace_philly_first_half.csv"), read_rates(data / "v100_pairs.csv")
    parts = {"tail": tail, "slices": slices, "unknown durations": unknown, "gangs": gangs}
    texts = {}
    for name, measure in parts.items():
        texts[name] = measure(trace, pairs)
        print(f"{name}:\n\n{texts[name]}", flush=True)
    (out / "queue.json").write_text(json.dumps(texts, indent=1) + "\n")
