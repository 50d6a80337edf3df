"""What a named profile asks of a GPU: from its telemetry if there is some, else from how it fared beside others.

The measured V100 pairs come without telemetry, yet an emulated job must show some, and it has to go with the job's
behaviour or nothing could be learned from it. So the contention model is read backwards: the utilisation that
presses and suffers as the profile did, and memory that fits beside whom it fitted.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from gpushare_lab.emulator.card import Demand
from gpushare_lab.job import contention
from gpushare_lab.job.pair_rates import EmulatedRates
from slurm_gpushare.protocol.errors import BadInput
from slurm_gpushare.protocol.files import read_rows

LEAST_MIB = 1200  # a CUDA context and a small model
ROUNDS = 60


def read_demand(path: Path, profile: str) -> Demand:
    """The row of `profile` in a profiles file: maxima where known, else means."""
    row = next((row for row in read_rows(path, ("profile",)) if row.get("profile") == profile), None)
    if row is None:
        raise BadInput(f"no profile {profile!r} in {path}")

    def number(*columns: str) -> float:
        found = next((column for column in columns if row.get(column)), None)
        if found is None:
            raise row.error(f"profile {profile!r} has no number in {' or '.join(columns)}")
        return row.number(found, 0.0)

    return Demand(
        number("mgup", "gpu_util_mean_pct"),
        number("mgtsamp", "mem_access_mean_pct"),
        round(number("mem_used_mib")),
        profile=profile,
    )


def infer_demand(table: EmulatedRates, profile: str, usable_mib: int) -> Demand:
    """Demand of a profile that is known by its pairs only."""
    logs = {pair: -math.log(rate) for pair, rate in table.rates.items()}
    everyone = _mean(list(logs.values()))
    presses = _mean([log for (_, neighbour), log in logs.items() if neighbour == profile])
    suffers = _mean([log for (victim, _), log in logs.items() if victim == profile])
    gpu, access = _utilisation(presses, suffers / everyone if everyone > 0 else 1.0)
    return Demand(100 * gpu, 100 * access, _memory_mib(table, usable_mib)[profile], profile=profile)


def _utilisation(pressure: float, exposure: float) -> tuple[float, float]:
    """GPU utilisation and memory access (0..1) of a job that presses and suffers so; nearest where none does."""

    def at(gpu: float) -> Demand:
        memory_bound = (exposure - contention.EXPOSURE + contention.SHELTER * gpu) / contention.MEMORY_BOUND
        return Demand(100 * gpu, 100 * gpu * min(0.9, max(0.1, memory_bound)), 0)

    low, high = 0.02, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if contention.pressure(at(middle)) < pressure:
            low = middle
        else:
            high = middle
    return high, at(high).mem_access_pct / 100


def _memory_mib(table: EmulatedRates, usable_mib: int) -> dict[str, int]:
    """Memory of every profile, so that pairs fit together, or do not, as they did on the real card.

    Each pair that is wrong pulls both of its jobs a little, until all agree or the rounds are over (measured pairs
    may contradict each other). Pairs that ran together always fit in the end.
    """
    fitting = sorted({(a, b) for a, b in table.rates if a <= b})
    clashing = sorted({(a, b) for a, b in table.infeasible if a <= b})
    clashes = {name: sum(name in pair for pair in clashing) / len(table.profiles) for name in table.profiles}
    memory = {name: LEAST_MIB + share * (0.9 * usable_mib - LEAST_MIB) for name, share in clashes.items()}

    def pull(pair: tuple[str, str], total_mib: float, up: bool) -> bool:
        gap = total_mib - memory[pair[0]] - memory[pair[1]]
        if (gap > 0) != up or gap == 0:
            return False
        for name in pair:
            memory[name] = min(max(memory[name] + gap / 4, LEAST_MIB), usable_mib - LEAST_MIB)
        return True

    for _ in range(ROUNDS if clashing else 0):
        wrong = [pull(pair, 1.03 * usable_mib, up=True) for pair in clashing]
        wrong += [pull(pair, 0.98 * usable_mib, up=False) for pair in fitting]
        if not any(wrong):
            break
    for a, b in fitting:
        over = memory[a] + memory[b] - usable_mib
        if over > 0:
            memory[max(a, b, key=memory.__getitem__)] -= over
    return {name: int(mib) for name, mib in memory.items()}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
