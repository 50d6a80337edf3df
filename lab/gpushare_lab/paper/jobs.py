"""The 24 jobs of the paper's experiment, 8 of each cluster: measured V100 pairs, or the built-in contention model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from gpushare_lab.emulator.card import Demand
from gpushare_lab.job.demands import infer_demand, read_demand
from gpushare_lab.job.pair_rates import EmulatedRates, read_pairs
from gpushare_lab.paper.rounds import CARD_MIB, Training, work_seconds
from slurm_gpushare.protocol.errors import BadInput

CLUSTERS = 3
USABLE_MIB = 16160

# Light, middle and heavy jobs as the paper's clusters have them: GPU utilisation and memory, in per cent.
_CENTRES = ((21.0, 8.0), (61.0, 43.0), (89.0, 56.0))


@dataclass(frozen=True, slots=True)
class Queue:
    """What comes in."""

    jobs: int = 24
    runs: int = 1
    """Of each workload: so many of the jobs have its token."""
    mean_s: float = 10.0
    spread: float = 1.0
    """Of the logarithm of what jobs take."""

    def __post_init__(self) -> None:
        each = CLUSTERS * self.runs
        if self.jobs < each or self.jobs % each:
            raise BadInput(
                f"{self.jobs} jobs cannot be divided among {CLUSTERS} clusters of workloads with {self.runs} runs each",
                f"Take a multiple of {each}.",
            )


def paper_jobs(pairs: Path | None, queue: Queue, seed: int = 0, profiles: Path | None = None) -> list[Training]:
    """The jobs in the order of their submission: a third of the workloads of each cluster, shuffled.

    `profiles` has the measured telemetry of the jobs of `pairs`; without it telemetry is inferred from their rates.
    """
    each = queue.jobs // (CLUSTERS * queue.runs)
    demands = _measured(pairs, each, seed, profiles) if pairs is not None else _modelled(each, seed)
    chance = random.Random(seed)
    chance.shuffle(demands)
    times = work_seconds(len(demands), queue.mean_s, seed, queue.spread)
    order = [workload for workload in range(len(demands)) for _ in range(queue.runs)]
    if queue.runs > 1:
        chance.shuffle(order)
    return [
        Training(number, workload, *demands[workload], times[workload], pairs) for number, workload in enumerate(order)
    ]


def _measured(path: Path, each: int, seed: int, profiles: Path | None) -> list[tuple[int, Demand]]:
    """Profiles by how hard they press on others: terciles of the mean log slow-down that they cause."""
    table = read_pairs(path, "V100")
    ranked = sorted(table.profiles, key=lambda name: _pressure(table, name))
    chance = random.Random(seed)
    found: list[tuple[int, Demand]] = []
    for cluster in range(CLUSTERS):
        low, high = (round(part * len(ranked) / CLUSTERS) for part in (cluster, cluster + 1))
        members = ranked[low:high]
        chosen = sorted(chance.sample(members, min(each, len(members))))
        chosen += [chance.choice(members) for _ in range(each - len(chosen))]
        for name in chosen:
            demand = infer_demand(table, name, USABLE_MIB) if profiles is None else read_demand(profiles, name)
            found.append((cluster, replace(demand, mem_mib=min(demand.mem_mib, USABLE_MIB))))
    return found


def _pressure(table: EmulatedRates, name: str) -> float:
    logs = [-math.log(rate) for (_, neighbour), rate in table.rates.items() if neighbour == name]
    return sum(logs) / len(logs) if logs else 0.0


def _modelled(each: int, seed: int) -> list[tuple[int, Demand]]:
    chance = random.Random(seed)
    found: list[tuple[int, Demand]] = []
    for cluster, (util, memory) in enumerate(_CENTRES):
        for _ in range(each):
            gpu = min(98.0, max(5.0, chance.gauss(util, 6.0)))
            mib = int(CARD_MIB * min(70.0, max(6.0, chance.gauss(memory, 6.0))) / 100)
            found.append((cluster, Demand(gpu, 0.4 * gpu, mib)))
    return found
