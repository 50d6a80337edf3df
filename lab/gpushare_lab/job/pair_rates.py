"""Measured co-run rates for emulated jobs, from the pairs files that every command reads.

Read without numpy: 32 jobs start at once on a small machine, in whatever Python their root file system has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.files import Row, read_rows

COLUMNS = ("profile_a", "profile_b", "gpu_model", "rate_a", "rate_b")


@dataclass(frozen=True)
class EmulatedRates:
    """Rates by (victim, neighbour), and the pairs that do not fit on one card together."""

    rates: Mapping[tuple[str, str], float]
    infeasible: frozenset[tuple[str, str]]

    @property
    def profiles(self) -> frozenset[str]:
        return frozenset(name for pair in (*self.rates, *self.infeasible) for name in pair)

    def clashes(self, profile: str) -> frozenset[str]:
        """The profiles that did not fit on one card with `profile`."""
        return frozenset(b for a, b in self.infeasible if a == profile)


def read_pairs(path: Path, gpu_name: str) -> EmulatedRates:
    """The pairs measured on this kind of GPU; a file of one kind only counts whatever it calls it."""
    rows = read_rows(path, COLUMNS)
    models = {row.get("gpu_model") for row in rows}
    rates: dict[tuple[str, str], float] = {}
    infeasible: set[tuple[str, str]] = set()
    for row in rows:
        if len(models) > 1 and row.get("gpu_model").lower() not in gpu_name.lower():
            continue
        a, b = row.get("profile_a"), row.get("profile_b")
        if row.get("feasible") == "0":
            infeasible |= {(a, b), (b, a)}
            continue
        rate_a, rate_b = _rate(row, "rate_a"), _rate(row, "rate_b")
        if a == b:
            rate_a = rate_b = (rate_a + rate_b) / 2  # two runs of one job cannot be told apart
        rates[a, b], rates[b, a] = rate_a, rate_b
    return EmulatedRates(rates, frozenset(infeasible))


def _rate(row: Row, column: str) -> float:
    value = row.number(column)
    if not 0.0 < value < 10.0:
        raise row.error(
            f"{column} '{row.get(column)}' is not a rate", "A rate is the speed shared over the speed alone, 0 to 1"
        )
    return min(value, 1.0)  # above 1 is noise of the measurement
