"""Several runs of one workload, combined into one profile that a single odd run cannot bend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from slurm_gpushare.telemetry.attributes import ATTRIBUTES
from slurm_gpushare.telemetry.record import Features, Record

Numbers = Mapping[str, float]

REMEMBERED_RUNS = 9
"""The latest runs that are combined: enough for a steady median, few enough to follow slow change."""

_TOLERANCE_POINTS = {
    "gpu_util_mean_pct": 15.0,
    "mem_access_mean_pct": 15.0,
    "mgmap": 15.0,
    # Maxima vary more from run to run than means do.
    "mgup": 25.0,
    "mgtsamp": 25.0,
}
_TOLERANCE_SCATTERS = 5.0
_LEAST_SAMPLES = 3
_LEAST_PART = 0.2  # of the usual time measured
_MOSTLY = 0.9  # of the time measured, for a run to count as alone
_MAD_TO_SD = 1.4826

_CORE = tuple(field.name for field in fields(Features))
# Of the other attributes, the means of those that tell workloads apart; all of them stay in the run's record.
_MEANS = {
    name: f"{name}_mean"
    for name in (
        "proc_sm_pct", "proc_mem_access_pct", "power_w", "power_pct", "sm_clock_mhz", "pcie_rx_mib_s", "pcie_tx_mib_s",
        "job_cpu_pct", "job_threads", "job_rss_mib",
    )
}  # fmt: skip
assert _MEANS.keys() <= ATTRIBUTES.keys()
_PEAKS = ("mem_used_mib", "mgmap")

# About the measurement, not about the workload: kept with the run, left out of the profile.
MEASURED_S, ALONE_PART, SAMPLES = "measured_s", "alone_part", "samples"
_ABOUT_MEASURING = frozenset({MEASURED_S, ALONE_PART, SAMPLES})


@dataclass(frozen=True, slots=True)
class Combined:
    """A profile's numbers."""

    features: Numbers
    scatter: Numbers


def features_of(record: Record) -> dict[str, float]:
    """What counts of a run: the features, the means of some attributes, and how well it was measured."""
    core = {name: getattr(record.features, name) for name in _CORE}
    numbers = {name: value for name, value in core.items() if value is not None}
    stats = record.profile.stats
    numbers.update((mean, stats[name].mean) for name, mean in _MEANS.items() if name in stats)
    util = stats.get("gpu_util_pct")
    numbers[SAMPLES] = util.n if util else 0
    numbers[MEASURED_S] = seconds = record.profile.seconds
    numbers[ALONE_PART] = record.profile.alone_s / seconds if seconds else 0.0
    return numbers


def describes_alone(run: Numbers) -> bool:
    """Whether a run shows what the workload does with a GPU of its own."""
    measured = "mgup" in run and "mgmap" in run and "mem_used_mib" in run
    return measured and run[SAMPLES] >= _LEAST_SAMPLES and run[ALONE_PART] >= _MOSTLY


def is_brief(earlier: Sequence[Numbers], new: Numbers) -> bool:
    """Whether a run was over so soon, compared with the earlier ones, that it says nothing."""
    return bool(earlier) and new[MEASURED_S] < _LEAST_PART * _median([run[MEASURED_S] for run in earlier])


def unlike(earlier: Sequence[Numbers], new: Numbers) -> str | None:
    """How `new` differs from what the earlier runs have in common, or None if it fits in."""
    for name, points in _TOLERANCE_POINTS.items():
        values = [run[name] for run in earlier if name in run]
        if not values or name not in new:
            continue
        usual = _median(values)
        away = abs(new[name] - usual)
        if away > points and away > _TOLERANCE_SCATTERS * _scatter(values, usual):
            return f"{name} {usual:.0f} -> {new[name]:.0f}"
    return None


def combine(runs: Sequence[Numbers]) -> Combined:
    """The median of every number, and the scatter of the features; memory is the highest peak.

    A profile that says too little memory would make a neighbour run out of it, so there the median will not do.
    """
    if len(runs) == 1:
        return Combined({name: value for name, value in runs[0].items() if name not in _ABOUT_MEASURING}, {})
    features: dict[str, float] = {}
    scatter: dict[str, float] = {}
    for name in {name: None for run in runs for name in run if name not in _ABOUT_MEASURING}:
        values = [run[name] for run in runs if name in run]
        middle = _median(values)
        features[name] = max(values) if name in _PEAKS else middle
        if len(values) > 1 and name in _CORE:
            scatter[name] = _scatter(values, middle)
    return Combined(features, scatter)


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _scatter(values: Sequence[float], middle: float) -> float:
    """The median deviation, scaled to be the standard deviation of normally distributed values."""
    return _MAD_TO_SD * _median([abs(value - middle) for value in values])
