"""The emulated card's contention model beside the measured V100 pairs: is the spread of ISD and PS alike?

Run with ``python -m bench.bench_contention``; it needs the measured data (GPUSHARE_DATA).
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
from gpushare_lab.emulator.card import Demand
from gpushare_lab.job.contention import rate
from gpushare_lab.job.pair_rates import read_pairs

QUANTILES = (0, 5, 10, 25, 50, 75, 90, 95, 100)
Rates = Mapping[tuple[str, str], float]


def data_dir() -> Path:
    return Path(os.environ.get("GPUSHARE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def model_rates(demands: Sequence[Demand]) -> dict[tuple[str, str], float]:
    """Every ordered pair of a population, by the model."""
    return {(a.profile, b.profile): rate(a, [b]) for a in demands for b in demands}


def population(path: Path) -> list[Demand]:
    """The paper's workloads that use the GPU at least 10 %, by their measured maxima."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    demands = [Demand(float(row["MGUP"]), float(row["MaGTSAMP"]), 0, profile=row["ID"]) for row in rows]
    return [demand for demand in demands if demand.gpu_util_pct >= 10]


def packing_saving_pct(rate_a: float, rate_b: float) -> float:
    """PS of two jobs of equal length: the faster ends first, the other goes on alone."""
    fast, slow = max(rate_a, rate_b), min(rate_a, rate_b)
    return 100 * (1 - (1 / fast + 1 - slow / fast) / 2)


def summary(rates: Rates) -> dict[str, object]:
    """Quantiles of ISD and PS, and who explains the variance of log slow-down."""
    names = sorted({a for a, _ in rates})
    pairs = [(a, b) for a, b in combinations_with_replacement(names, 2) if (a, b) in rates and (b, a) in rates]
    isd = [100 * (1 / rates[pair] - 1) for a, b in pairs for pair in ((a, b), (b, a))]
    saving = [packing_saving_pct(rates[a, b], rates[b, a]) for a, b in pairs]
    ordered = list(rates)
    logs = np.array([-math.log(rates[pair]) for pair in ordered])
    victims = [logs[[a == name for a, _ in ordered]].mean() for name in names]
    presses = [logs[[b == name for _, b in ordered]].mean() for name in names]
    return {
        "jobs": len(names),
        "pairs": len(pairs),
        "isd_pct": dict(zip(QUANTILES, np.percentile(isd, QUANTILES).round(1).tolist(), strict=True)),
        "ps_pct": dict(zip(QUANTILES, np.percentile(saving, QUANTILES).round(1).tolist(), strict=True)),
        "ps_positive_pct": round(100 * float(np.mean(np.array(saving) > 0)), 1),
        "both_isd_under_25_pct": round(100 * float(np.mean([rates[a, b] > 0.8 < rates[b, a] for a, b in pairs])), 1),
        "explained_by_neighbour_pct": round(100 * _explained(logs, [b for _, b in ordered]), 1),
        "explained_by_victim_pct": round(100 * _explained(logs, [a for a, _ in ordered]), 1),
        "explained_by_product_pct": round(100 * _explained_by_product(rates, names), 1),
        "correlation_pressing_suffering": round(float(np.corrcoef(victims, presses)[0, 1]), 2),
    }


def _explained(values: np.ndarray, groups: Sequence[str]) -> float:
    """Share of variance between groups."""
    labels = np.array(groups)
    fitted = np.empty_like(values)
    for label in set(groups):
        fitted[labels == label] = values[labels == label].mean()
    return float(fitted.var() / values.var())


def _explained_by_product(rates: Rates, names: Sequence[str]) -> float:
    """Share of variance of log slow-down explained by (a number of the victim) x (a number of the neighbour)."""
    place = {name: index for index, name in enumerate(names)}
    logs, known = np.zeros((len(names), len(names))), np.zeros((len(names), len(names)))
    for (victim, neighbour), value in rates.items():
        logs[place[victim], place[neighbour]] = -math.log(value)
        known[place[victim], place[neighbour]] = 1
    exposure, pressure = np.ones(len(names)), np.ones(len(names))
    for _ in range(200):
        pressure = logs.T @ exposure / (known.T @ exposure**2)
        exposure = logs @ pressure / (known @ pressure**2)
    left = (logs - np.outer(exposure, pressure))[known > 0]
    return float(1 - (left**2).mean() / logs[known > 0].var())


def table(measured: Mapping[str, object], model: Mapping[str, object]) -> str:
    """The comparison as a Markdown table."""
    lines = ["| | V100, measured | contention model |", "|---|---|---|"]
    for key, value in measured.items():
        other = model[key]
        if isinstance(value, dict) and isinstance(other, dict):
            for quantile in QUANTILES:
                lines.append(f"| {key}, {quantile} % quantile | {value[quantile]} | {other[quantile]} |")
        else:
            lines.append(f"| {key} | {value} | {other} |")
    return "\n".join(lines)


def main(out: Path) -> None:
    data = data_dir()
    if not (data / "v100_pairs.csv").is_file():
        print(f"contention: skipped, no measured data in {data} (GPUSHARE_DATA)")
        return
    measured = summary(read_pairs(data / "v100_pairs.csv", "V100").rates)
    model = summary(model_rates(population(data / "paper_workloads.csv")))
    text = table(measured, model)
    out.mkdir(parents=True, exist_ok=True)
    (out / "contention.json").write_text(json.dumps({"measured": measured, "model": model}, indent=1))
    (out / "contention.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(Path("out/bench"))
