"""Several runs of one workload, combined into one profile that a single odd run cannot bend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

from slurm_gpushare.protocol.attributes import ATTRIBUTES
from slurm_gpushare.protocol.record import Features, Record

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
_LEAST_LATER_SAMPLES = 5
LEAST_PART = 0.2  # of the usual time measured
_MOSTLY = 0.9  # of the time measured, for a run to count as alone
_MAD_TO_SD = 1.4826

_CORE = tuple(field.name for field in fields(Features))
# Of the other attributes, the means of those that tell workloads apart; all of them stay in the run's record.
_MEANS = {
    name: f"{name}_mean"
    for name in (
        "proc_sm_pct", "proc_mem_access_pct", "power_w", "power_pct", "sm_clock_mhz", "pcie_rx_mib_s", "pcie_tx_mib_s",
        "job_cpu_pct", "job_threads", "job_rss_mib", "gpu_mem_pct",
    )
}  # fmt: skip
assert _MEANS.keys() <= ATTRIBUTES.keys()
# How much the samples of a run differ among themselves: what a running job may show for a while.
_WITH_SD = {"gpu_util_mean_pct": "gpu_util_pct", "mem_access_mean_pct": "mem_access_pct"}
_ALONE_PEAKS = {"mgup": "gpu_util_pct", "mgmap": "gpu_mem_pct", "mgtsamp": "mem_access_pct"}
_PEAKS = ("mem_used_mib", "mgmap")

GPUS = "gpus"
"""Of a gang: on how many GPUs it was measured."""
# About the measurement, not about the workload: kept with the run, left out of the profile.
MEASURED_S, ALONE_PART, SAMPLES = "measured_s", "alone_part", "samples"
_ABOUT_MEASURING = frozenset({MEASURED_S, ALONE_PART, SAMPLES})


@dataclass(frozen=True, slots=True)
class Combined:
    """A profile's numbers."""

    features: Numbers
    scatter: Numbers


def features_of(record: Record) -> dict[str, float]:
    """What counts of a run: the features, the means of some attributes, and how well it was measured.

    The job itself says when its profile ends (GPUSHARE_EPOCH_FILE), so what it does alone after that counts too where
    it is more: else a job could be idle first, and anything later.
    """
    core = {name: getattr(record.features, name) for name in _CORE}
    numbers = {name: value for name, value in core.items() if value is not None}
    for name, value in _whole_run(record).items():
        numbers[name] = max(numbers.get(name, 0.0), value)
    stats = record.profile.stats
    numbers.update((mean, stats[name].mean) for name, mean in _MEANS.items() if name in stats)
    if not record.shared_s:  # whole epochs, not one whose ends fall between two samples
        whole = record.alone.stats
        numbers.update(
            (_MEANS[name], whole[name].mean) for name in ("proc_sm_pct", "proc_mem_access_pct") if name in whole
        )
    numbers.update((sd_name(mean), stats[name].sd) for mean, name in _WITH_SD.items() if name in stats)
    if record.gpus > 1:
        numbers[GPUS] = record.gpus
    util = stats.get("gpu_util_pct")
    numbers[SAMPLES] = util.n if util else 0
    numbers[MEASURED_S] = seconds = record.profile.seconds
    numbers[ALONE_PART] = record.profile.alone_s / seconds if seconds else 0.0
    return numbers


def _whole_run(record: Record) -> dict[str, float]:
    """The highest activity of the whole run alone, and the means of what came after the profile."""
    found: dict[str, float] = {}
    for peak, attribute in _ALONE_PEAKS.items():
        if attribute in record.alone.stats:
            found[peak] = record.alone.stats[attribute].max
    for mean, attribute in _WITH_SD.items():
        whole, first = record.alone.stats.get(attribute), record.profile.stats.get(attribute)
        if whole is None or first is None or whole.n - first.n < _LEAST_LATER_SAMPLES:
            continue
        later = (whole.n * whole.mean - first.n * first.mean) / (whole.n - first.n)
        found[mean] = min(max(later, 0.0), whole.max)
    return found


def gpus_in(features: str) -> int:
    """On how many GPUs a workload was measured, from its profile's features as the store has them."""
    return int(json.loads(features).get(GPUS, 1)) if f'"{GPUS}"' in features else 1


def sd_name(feature: str) -> str:
    """Under which name a profile has the standard deviation of the samples that a mean is of."""
    return feature.replace("_mean_", "_sd_")


def tolerance_points(feature: str, scatter: Numbers) -> float:
    """How far a run's number may be from the profile's before it is another workload's."""
    return max(_TOLERANCE_POINTS[feature], _TOLERANCE_SCATTERS * scatter.get(feature, 0.0))


def describes_alone(run: Numbers) -> bool:
    """Whether a run shows what the workload does with a GPU of its own."""
    measured = "mgup" in run and "mgmap" in run and "mem_used_mib" in run
    return measured and run[SAMPLES] >= _LEAST_SAMPLES and run[ALONE_PART] >= _MOSTLY


def is_brief(earlier: Sequence[Numbers], new: Numbers) -> bool:
    """Whether a run was over so soon, compared with the earlier ones, that it says nothing."""
    return bool(earlier) and new[MEASURED_S] < LEAST_PART * median([run[MEASURED_S] for run in earlier])


def unlike(earlier: Sequence[Numbers], new: Numbers) -> str | None:
    """How `new` differs from what the earlier runs have in common, or None if it fits in."""
    before, now = (earlier[-1].get(GPUS, 1) if earlier else new.get(GPUS, 1)), new.get(GPUS, 1)
    if before != now:
        return f"{GPUS} {before:.0f} -> {now:.0f}"
    for name, points in _TOLERANCE_POINTS.items():
        values = [run[name] for run in earlier if name in run]
        if not values or name not in new:
            continue
        usual = median(values)
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
        middle = median(values)
        features[name] = max(values) if name in _PEAKS else middle
        if len(values) > 1 and name in _CORE:
            scatter[name] = _scatter(values, middle)
    return Combined(features, scatter)


def _scatter(values: Sequence[float], middle: float) -> float:
    """The median deviation, scaled to be the standard deviation of normally distributed values."""
    return _MAD_TO_SD * median([abs(value - middle) for value in values])
