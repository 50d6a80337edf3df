"""Measured co-run rates for emulated jobs, from the pairs files that every command reads.

Read here without numpy: 32 jobs start at once on a small machine, in whatever Python their root file system has.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.errors import BadInput

COLUMNS = ("profile_a", "profile_b", "gpu_model", "rate_a", "rate_b")


@dataclass(frozen=True)
class PairTable:
    """Rates by (victim, neighbour), and the pairs that do not fit on one card together."""

    rates: Mapping[tuple[str, str], float]
    infeasible: frozenset[tuple[str, str]]

    @property
    def profiles(self) -> frozenset[str]:
        return frozenset(name for pair in (*self.rates, *self.infeasible) for name in pair)

    def clashes(self, profile: str) -> frozenset[str]:
        """The profiles that did not fit on one card with `profile`."""
        return frozenset(b for a, b in self.infeasible if a == profile)


def read_pairs(path: Path, gpu_name: str) -> PairTable:
    """The pairs measured on this kind of GPU; a file of one kind only counts whatever it calls it."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(f"{path}: no column {missing[0]}", f"A pairs file has {', '.join(COLUMNS)}")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read pairs from {path}: {error}") from error
    models = {row["gpu_model"] for _, row in rows}
    rates: dict[tuple[str, str], float] = {}
    infeasible: set[tuple[str, str]] = set()
    for line, row in rows:
        if len(models) > 1 and row["gpu_model"].lower() not in gpu_name.lower():
            continue
        a, b = row["profile_a"], row["profile_b"]
        if (row.get("feasible") or "1").strip() == "0":
            infeasible |= {(a, b), (b, a)}
            continue
        rate_a, rate_b = _rate(path, line, row["rate_a"]), _rate(path, line, row["rate_b"])
        if a == b:
            rate_a = rate_b = (rate_a + rate_b) / 2  # two runs of one job cannot be told apart
        rates[a, b], rates[b, a] = rate_a, rate_b
    return PairTable(rates, frozenset(infeasible))


def _rate(path: Path, line: int, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = 0.0
    if not 0.0 < value < 10.0:
        raise BadInput(
            f"{path}:{line}: {text!r} is not a rate", "A rate is the speed shared over the speed alone, 0 to 1"
        )
    return min(value, 1.0)  # above 1 is noise of the measurement
