"""How long the plan takes as queue and cluster grow."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np

from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import Gpu, NodeRoom, Occupant, PendingJob, Snapshot, Workload
from slurm_gpushare.knowledge.learning import LearnedKnowledge
from slurm_gpushare.protocol.policy import PolicySettings

SIZES = ((1_000, 250), (10_000, 2_500), (50_000, 12_500))
GPUS_A_NODE = 4
REPEATS = 3


def snapshot(pending: int, gpus: int, tokens: int) -> Snapshot:
    """A busy site: every card has one sharer, jobs of two partitions wait, durations have a heavy tail."""
    random = np.random.default_rng(pending)
    names = [f"gs-{i:020d}" for i in range(tokens)]
    now_s = 1e9

    def duration_s() -> float:
        return float(np.exp(random.normal(7.5, 1.8)))

    def workload(run_s: float) -> Workload:
        token, cluster = names[random.integers(tokens)], int(random.integers(3))
        return Workload(
            token, cluster, mem_used_mib=int(random.integers(1000, 9000)), limit_s=3 * run_s, expected_s=run_s
        )

    def occupant(i: int) -> Occupant:
        run_s = 10 * duration_s() + 3600
        return Occupant(
            f"r{i}",
            workload(run_s),
            start_s=now_s - run_s * random.uniform(0, 0.9),
        )

    def job(i: int) -> PendingJob:
        run_s = duration_s()
        return PendingJob(
            f"p{i}",
            workload(run_s),
            cpus=int(random.choice([2, 4, 8])),
            node_mem_mib=8000,
            partitions=frozenset(["gpu" if random.random() < 0.8 else "debug"]),
            eligible_s=now_s - 600,
        )

    nodes = [
        NodeRoom(f"n{i}", 64, 512_000, frozenset(["gpu", "debug"] if i % 4 == 0 else ["gpu"]))
        for i in range(math.ceil(gpus / GPUS_A_NODE))
    ]
    return Snapshot(
        now_s=now_s,
        gpus=tuple(
            Gpu(f"n{i // GPUS_A_NODE}", i % GPUS_A_NODE, "v100", 32_000, occupants=(occupant(i),)) for i in range(gpus)
        ),
        nodes={node.name: node for node in nodes},
        pending=tuple(job(i) for i in range(pending)),
        mean_duration_s={1: 2500.0},
    )


def taught(tokens: int) -> LearnedKnowledge:
    """Knowledge that has seen every token share a few times."""
    random = np.random.default_rng(1)
    knowledge = LearnedKnowledge()
    for i in range(tokens):
        for j in random.integers(tokens, size=3):
            knowledge.observe(f"gs-{i:020d}", f"gs-{int(j):020d}", float(random.uniform(0.6, 1.0)))
    return knowledge


def main(out: Path) -> None:
    results = []
    for label, tokens_of in (("100 tokens", lambda _: 100), ("a token for every five jobs", lambda jobs: jobs // 5)):
        times = []
        for pending, gpus in SIZES:
            look, knowledge = snapshot(pending, gpus, tokens_of(pending)), taught(tokens_of(pending))
            best_s, placed = math.inf, 0
            for _ in range(REPEATS):
                began = time.process_time()
                placed = len(plan(look, knowledge, PolicySettings()).placements)
                best_s = min(best_s, time.process_time() - began)
            times.append(best_s)
            results.append({"tokens": label, "pending": pending, "gpus": gpus, "plan_s": best_s, "placed": placed})
            print(f"{label}: {pending} pending on {gpus} GPUs: {best_s:.3f} s of CPU, {placed} placed", flush=True)
        exponent = math.log(times[-1] / times[0]) / math.log(SIZES[-1][0] / SIZES[0][0])
        results.append({"tokens": label, "growth_exponent": exponent})
        print(f"{label}: time grows with the size to the power {exponent:.2f}")
    (out / "plan.json").write_text(json.dumps(results, indent=1) + "\n")
