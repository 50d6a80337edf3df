"""New runs of a token change its profile: combined with the earlier ones, or in their place."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, dist, log, sqrt
from statistics import fmean, median
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, or_, select, update

from slurm_gpushare.protocol.record import Record, enough_cpus, parse_record
from slurm_gpushare.store import schema
from slurm_gpushare.store.combine import REMEMBERED_RUNS, Numbers, combine, describes_alone, is_brief, unlike
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.statements import chunks, delete_in, next_change, select_in
from slurm_gpushare.store.workloads import LOG_DURATION, Profile, marks, touch

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
