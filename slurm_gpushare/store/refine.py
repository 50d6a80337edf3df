"""New runs of a token change its profile: combined with the earlier ones, or in their place."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, dist, log, sqrt
from statistics import fmean, median
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, or_, select, update

from slurm_gpushare.protocol.attributes import ATTRIBUTES
from slurm_gpushare.protocol.record import Features, Record, enough_cpus, parse_record
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.statements import chunks, delete_in, next_change, select_in
from slurm_gpushare.store.workloads import LOG_DURATION, Profile, marks, touch

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


_Key = tuple[str, str]  # token, GPU model


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """A run as far as profiles are concerned."""

    id: int
    token: str
    gpu_model: str
    by_node: bool
    start_s: float
    elapsed_s: float
    never_shared: bool
    features: Numbers

    @classmethod
    def of(cls, row: Any, token: str) -> RunNumbers:
        return cls(
            id=row.id,
            token=token,
            gpu_model=row.gpu_model,
            by_node=bool(row.by_node),
            start_s=row.start_s,
            elapsed_s=row.end_s - row.start_s,
            never_shared=row.shared_s == 0,
            features=json.loads(row.features),
        )


@dataclass(slots=True)
class Settled:
    """What became of waiting runs."""

    counts: Counter[str] = field(default_factory=Counter)
    """``counted``, ``kept``, ``untokened``, ``foreign``, ``outranked``, ``restarted``."""
    restarts: list[str] = field(default_factory=list)
    """One line for each profile that a run much unlike the earlier ones started anew."""

    def add(self, other: Settled) -> None:
        self.counts.update(other.counts)
        self.restarts.extend(other.restarts)


@dataclass(slots=True)
class _State:
    """A profile while new runs are added to it."""

    generation: int = 1
    count: int = 0
    runs: list[RunNumbers] = field(default_factory=list)
    """The latest of them, of nodes and of users."""
    anew_since_s: int | None = None
    """The token must be measured anew, by a run that begins later."""
    measured_anew: bool = False
    exists: bool = False
    changed: bool = False
    memory_grew: bool = False
    cluster: int | None = None
    mem_used_mib: float = 0.0

    def vouched(self) -> list[RunNumbers]:
        """The latest runs that a node vouches for."""
        return [run for run in self.runs if run.by_node][-REMEMBERED_RUNS:]

    def basis(self) -> list[RunNumbers]:
        """The runs that the profile is combined from: users' own are never more than those of nodes."""
        vouched = self.vouched()
        own = [run for run in self.runs if not run.by_node]
        return vouched + own[max(0, len(own) - len(vouched)) :]


def refine(connection: Connection, fresh: Sequence[RunNumbers]) -> Settled:
    """Add `fresh` runs, in order, to their profiles."""
    result = Settled()
    states = _load(connection, {(run.token, run.gpu_model) for run in fresh})
    verdicts: list[dict[str, Any]] = []
    for run in fresh:
        state = states[run.token, run.gpu_model]
        counted = _add(state, run, result)
        verdicts.append({"b_id": run.id, "token": run.token, "state": "counted" if counted else "kept",
                         "generation": state.generation if counted else None})  # fmt: skip
    if verdicts:
        mark = (
            update(schema.run).where(schema.run.c.id == bindparam("b_id")).values(settled_seq=next_change(connection))
        )
        connection.execute(mark, verdicts)
    _save(connection, states)
    touch(connection, {token for (token, _), state in states.items() if state.measured_anew}, measure_since_s=None)
    result.counts.update(verdict["state"] for verdict in verdicts)
    return result


def by_nodes(database: Database, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles with the features that nodes alone have measured; without runs in the store they are as they are."""
    found: list[Profile] = []
    with database.read() as connection:
        for chunk in chunks(profiles):
            states = _load(connection, {(profile.token, profile.gpu_model) for profile in chunk})
            for profile in chunk:
                vouched = states[profile.token, profile.gpu_model].vouched()
                features = combine([run.features for run in vouched]).features if vouched else profile.features
                found.append(replace(profile, features=features))
    return found


def uncount(connection: Connection, run_ids: Collection[int]) -> None:
    """Take runs out of the number of runs that their profiles rest on, before they are replaced or outranked."""
    p, r = schema.profile, schema.run.c
    counted = select(r.token, r.gpu_model, r.generation).where(r.state == "counted")
    for row in select_in(connection, counted, r.id, run_ids):
        same = (p.c.token == row.token, p.c.gpu_model == row.gpu_model, p.c.generation == row.generation)
        connection.execute(update(p).where(*same).values(runs=p.c.runs - 1))


def forget_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """Remove runs with their numbers."""
    delete_in(connection, schema.run_detail.c.id, run_ids)
    delete_in(connection, schema.run.c.id, run_ids)


def _add(state: _State, run: RunNumbers, result: Settled) -> bool:
    mem_mib = run.features.get("mem_used_mib", 0.0)
    if state.exists and mem_mib > state.mem_used_mib:
        # Shared runs also raise the memory peak.
        state.mem_used_mib, state.memory_grew = mem_mib, True
    earlier = [item.features for item in state.vouched()]
    if not describes_alone(run.features) or not run.gpu_model or is_brief(earlier, run.features):
        return False
    reason = unlike(earlier, run.features)
    if not run.by_node and (reason or not earlier):
        return False  # a user's own record can only refine a profile that nodes have measured
    if run.by_node and state.anew_since_s is not None and run.never_shared and run.start_s >= state.anew_since_s:
        state.measured_anew, state.anew_since_s = True, None
        reason = reason or "a job was past its profile"
    if reason:
        state.generation += 1
        state.count = 0
        state.runs.clear()
        state.mem_used_mib = 0.0
        result.counts["restarted"] += 1
        result.restarts.append(f"{run.token}: a run unlike the earlier ones ({reason}) starts its profile anew")
    state.runs.append(run)
    state.count += 1
    state.mem_used_mib = max(state.mem_used_mib, mem_mib)
    state.changed = state.exists = True
    return True


def _load(connection: Connection, keys: set[_Key]) -> dict[_Key, _State]:
    states = {key: _State() for key in keys}
    p, tokens = schema.profile.c, sorted({token for token, _ in keys})
    for chunk in chunks(tokens):
        query = select(p.token, p.gpu_model, p.generation, p.runs, p.cluster, p.mem_used_mib).where(p.token.in_(chunk))
        for row in connection.execute(query):
            state = states.get((row.token, row.gpu_model))
            if state is not None:
                state.generation, state.count, state.exists = row.generation, row.runs, True
                state.cluster, state.mem_used_mib = row.cluster, row.mem_used_mib
        for row in connection.execute(_EARLIER, {"b_tokens": chunk}):
            state = states.get((row.token, row.gpu_model))
            if state is not None:
                state.runs.append(RunNumbers.of(row, row.token))
    since_s = marks(connection, tokens)
    for (token, _), state in states.items():
        state.anew_since_s = since_s.get(token)
    return states


def _earlier() -> Select[Any]:
    """The latest runs that the profiles of some tokens rest on, oldest first."""
    r, p, d = schema.run.c, schema.profile.c, schema.run_detail.c
    place = func.row_number().over(partition_by=(r.token, r.gpu_model, r.by_node), order_by=r.id.desc())
    same = (r.token == p.token) & (r.gpu_model == p.gpu_model) & (r.generation == p.generation)
    latest = (
        select(r.id, r.token, r.gpu_model, r.by_node, r.start_s, r.end_s, r.shared_s, place.label("place"))
        .join_from(schema.run, schema.profile, same)
        .where(r.token.in_(bindparam("b_tokens", expanding=True)), r.state == "counted")
        .subquery()
    )
    return (
        select(latest, d.features)
        .join_from(latest, schema.run_detail, latest.c.id == d.id)
        .where(latest.c.place <= REMEMBERED_RUNS)
        .order_by(latest.c.id)
    )


_EARLIER = _earlier()


def _save(connection: Connection, states: Mapping[_Key, _State]) -> None:
    p, now_s = schema.profile, int(time.time())
    anew = [_row(key, state, now_s) for key, state in states.items() if state.changed]
    insert_many(connection, p, anew, replace=True)
    for (token, gpu_model), state in states.items():
        if state.memory_grew and not state.changed:
            where = (p.c.token == token, p.c.gpu_model == gpu_model)
            connection.execute(update(p).where(*where).values(mem_used_mib=ceil(state.mem_used_mib)))
    touch(connection, {token for (token, _), state in states.items() if state.changed or state.memory_grew})


def _log_scatter(elapsed_s: Sequence[float]) -> dict[str, float]:
    """How far whole runs differ in length: the standard deviation of the logarithm."""
    logs = [log(value) for value in elapsed_s if value > 0]
    return {LOG_DURATION: dist(logs, [fmean(logs)] * len(logs)) / sqrt(len(logs))} if len(logs) > 1 else {}


def _row(key: _Key, state: _State, now_s: int) -> dict[str, Any]:
    runs = state.basis()
    combined = combine([run.features for run in runs])
    elapsed = [run.elapsed_s for run in runs if run.by_node and run.never_shared]
    return {
        "token": key[0],
        "gpu_model": key[1],
        "generation": state.generation,
        "runs": state.count,
        "mem_used_mib": ceil(state.mem_used_mib),
        "mem_total_mib": round(combined.features.get("mem_total_mib", 0.0)),
        "duration_s": median(elapsed) if elapsed else None,
        "features": json.dumps(combined.features),
        "scatter": json.dumps({**combined.scatter, **_log_scatter(elapsed)}),
        "cluster": state.cluster,  # the old one holds until the helper has assigned the new one
        "needs_cluster": 1,
        "updated_s": now_s,
    }


def keep_curves(connection: Connection, tokens: Mapping[int, str]) -> None:
    """Keep how many CPUs workloads need, by the curves that users' runs brought; the latest measured counts.

    A user's own record is enough here, although it founds no profile: it only decides what jobs of the same owner with
    ``cpus=auto`` ask for, and ``sbatch -c`` would do as much.
    """
    d, w = schema.run_detail.c, schema.workload
    found: dict[str, Record] = {}
    for row in select_in(connection, select(d.id, d.body), d.id, tokens):
        record, token = parse_record(row.body), tokens[row.id]
        if record.cpu_curve and (token not in found or record.end_s > found[token].end_s):
            found[token] = record
    for token, record in found.items():
        older = or_(w.c.cpus_at_s.is_(None), w.c.cpus_at_s <= record.end_s)
        values = {"cpus": enough_cpus(record.cpu_curve), "cpus_at_s": int(record.end_s)}
        connection.execute(update(w).where(w.c.token == token, older).values(values))
    touch(connection, found)
