"""Workloads and their profiles: who owns a token, and what is known of it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select, update

from slurm_gpushare.store import schema
from slurm_gpushare.store.counters import next_change
from slurm_gpushare.store.database import Database, insert_many

_CHUNK = 500  # parameters of one IN (...): SQLite before 3.32 takes 999
LOG_DURATION = "log_duration"
"""Name of the scatter of whole runs' lengths: the standard deviation of the logarithm."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A token and whose it is."""

    token: str
    owner_uid: int
    mem_floor_mib: int
    """Memory that it is known to need because it once ran out with less."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a token on a GPU model: the robust combination of `runs` runs alone."""

    token: str
    gpu_model: str
    owner_uid: int
    generation: int
    """1, and one more each time a run much unlike the earlier ones started the profile anew."""
    runs: int
    mem_used_mib: int
    """The highest peak seen, and at least what an out-of-memory taught."""
    mem_total_mib: int
    duration_s: float | None
    """Median time of a whole job alone; None where no such job was seen."""
    features: Mapping[str, float]
    """mgup, mgmap, mgtsamp, gpu_util_mean_pct, mem_access_mean_pct, mem_used_mib, mem_total_mib and the means of
    some other attributes (``power_w_mean``, see `combine`); what was not measured is absent."""
    scatter: Mapping[str, float]
    """How far the runs differ in mgup ... mem_total_mib, as a robust standard deviation, and in `LOG_DURATION`; empty
    for a single run."""
    cluster: int | None
    model_version: int | None
    restarted_s: int | None
    updated_s: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The cluster that a model gives a profile."""

    token: str
    gpu_model: str
    cluster: int


class Workloads:
    """``store.workloads``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, token: str) -> Workload | None:
        w = schema.workload.c
        query = select(w.token, w.owner_uid, w.mem_floor_mib).where(w.token == token)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return Workload(*row) if row else None

    def claim(self, owners: Mapping[str, int]) -> dict[str, int]:
        """The owner of each token: the given uid if it had none. The helper claims for jobs as it sees them."""
        if not owners:
            return {}
        with self._db.write() as connection:
            return claim(connection, owners)

    def raise_memory(self, token: str, mem_mib: int) -> None:
        """Remember that the workload needs at least `mem_mib`, e.g. after an out-of-memory beside a neighbour."""
        w = schema.workload
        with self._db.write() as connection:
            connection.execute(
                update(w)
                .where(w.c.token == token, w.c.mem_floor_mib < mem_mib)
                .values(mem_floor_mib=mem_mib, change_seq=next_change(connection))
            )


class Profiles:
    """``store.profiles``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, token: str) -> Profile | None:
        """The token's profile; of several GPU models, the one that was updated last."""
        found = self.of({token})
        return found.get(token)

    def of(self, tokens: Collection[str]) -> dict[str, Profile]:
        """The profiles of `tokens`, each of the GPU model that was updated last; unknown tokens are absent."""
        wanted = sorted(tokens)
        found: dict[str, Profile] = {}
        with self._db.read() as connection:
            for at in range(0, len(wanted), _CHUNK):
                query = _PROFILES.where(schema.profile.c.token.in_(wanted[at : at + _CHUNK]))
                for profile in _read(connection, query.order_by(schema.profile.c.updated_s)):
                    found[profile.token] = profile
        return found

    def all(self, gpu_model: str | None = None) -> Iterator[Profile]:
        """Every profile (of one GPU model), in order of token."""
        query = _PROFILES.order_by(schema.profile.c.token, schema.profile.c.gpu_model)
        if gpu_model is not None:
            query = query.where(schema.profile.c.gpu_model == gpu_model)
        with self._db.read() as connection:
            yield from _read(connection, query)

    def unassigned(self, limit: int = 100_000) -> list[Profile]:
        """Profiles that are new or changed since they were given a cluster."""
        with self._db.read() as connection:
            return list(_read(connection, _PROFILES.where(schema.profile.c.needs_cluster == 1).limit(limit)))

    def assign(self, assignments: Collection[Assignment], model_version: int) -> None:
        """Record clusters, all in one transaction: the hook's file then has all of them or none."""
        with self._db.write() as connection:
            assign(connection, assignments, model_version)


_p, _w = schema.profile.c, schema.workload.c
_PROFILES: Select[Any] = select(schema.profile, _w.owner_uid, _w.mem_floor_mib).join_from(
    schema.profile, schema.workload, _p.token == _w.token
)


def _read(connection: Connection, query: Select[Any]) -> Iterator[Profile]:
    for row in connection.execute(query):
        yield Profile(
            token=row.token,
            gpu_model=row.gpu_model,
            owner_uid=row.owner_uid,
            generation=row.generation,
            runs=row.runs,
            mem_used_mib=max(row.mem_used_mib, row.mem_floor_mib),
            mem_total_mib=row.mem_total_mib,
            duration_s=row.duration_s,
            features=json.loads(row.features),
            scatter=json.loads(row.scatter),
            cluster=row.cluster,
            model_version=row.model_version,
            restarted_s=row.restarted_s,
            updated_s=row.updated_s,
        )


def claim(connection: Connection, owners: Mapping[str, int]) -> dict[str, int]:
    """Owners of tokens, given who asks for each; a token without an owner goes to who asks."""
    w = schema.workload
    found: dict[str, int] = {}
    wanted = sorted(owners)
    for at in range(0, len(wanted), _CHUNK):
        rows = connection.execute(select(w.c.token, w.c.owner_uid).where(w.c.token.in_(wanted[at : at + _CHUNK])))
        found.update((token, uid) for token, uid in rows)
    new = [token for token in wanted if token not in found]
    if new:
        seq, now_s = next_change(connection), int(time.time())
        rows_to_add = [
            {"token": t, "owner_uid": owners[t], "created_s": now_s, "mem_floor_mib": 0, "change_seq": seq} for t in new
        ]
        insert_many(connection, w, rows_to_add)
    return {token: found.get(token, owners[token]) for token in wanted}


def touch(connection: Connection, tokens: Collection[str]) -> None:
    """Mark `tokens` as changed for the hook's file."""
    w = schema.workload
    seq, wanted = next_change(connection), sorted(tokens)
    for at in range(0, len(wanted), _CHUNK):
        connection.execute(update(w).where(w.c.token.in_(wanted[at : at + _CHUNK])).values(change_seq=seq))


def assign(connection: Connection, assignments: Collection[Assignment], model_version: int) -> None:
    """`Profiles.assign` inside a transaction that is already open."""
    if not assignments:
        return
    p = schema.profile
    statement = (
        update(p)
        .where(p.c.token == bindparam("b_token"), p.c.gpu_model == bindparam("b_model"))
        .values(cluster=bindparam("b_cluster"), model_version=model_version, needs_cluster=0)
    )
    connection.execute(
        statement, [{"b_token": a.token, "b_model": a.gpu_model, "b_cluster": a.cluster} for a in assignments]
    )
    touch(connection, {a.token for a in assignments})
