"""Workloads and their profiles: who owns a token, and what is known of it on each GPU model.

A model has two names: the site's (``v100``, in features and GRES types), and the cards' own (``V100``). Telemetry,
profiles and rates are kept by the card's own, since that is what nodes measure.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, func, select, update

from slurm_gpushare.protocol.record import gpu_model
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, Subject, insert_many
from slurm_gpushare.store.statements import chunks, next_change, select_in

TOKENS_A_USER = 10_000
"""One token a workload: more would be a user who fills the store with them."""
_UNASSIGNED_AT_ONCE = 100_000
LOG_DURATION = "log_duration"
"""Name of the scatter of whole runs' lengths: the standard deviation of the logarithm."""


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
    updated_s: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The cluster that a model gives a profile."""

    token: str
    gpu_model: str
    cluster: int


class Workloads(Subject):
    """``store.workloads``."""

    def claim(self, owners: Mapping[str, int]) -> dict[str, int]:
        """The owner of each token: the given uid if it had none. The helper claims for jobs as it sees them."""
        if not owners:
            return {}
        with self._db.write() as connection:
            return claim(connection, owners, TOKENS_A_USER)

    def of_owner(self, uid: int) -> dict[str, int]:
        """The user's tokens, each with the time when it was first seen."""
        w = schema.workload.c
        with self._db.read() as connection:
            rows = connection.execute(select(w.token, w.created_s).where(w.owner_uid == uid))
            return {row.token: row.created_s for row in rows}

    def owners_by_token(self, tokens: Collection[str]) -> dict[str, int]:
        """Whose token each is; one that is nobody's is absent."""
        with self._db.read() as connection:
            return owners_of(connection, tokens)

    def raise_memory(self, token: str, mem_mib: int) -> None:
        """Remember that the workload needs at least `mem_mib`, e.g. after an out-of-memory beside a neighbour."""
        w = schema.workload
        with self._db.write() as connection:
            connection.execute(
                update(w)
                .where(w.c.token == token, w.c.mem_floor_mib < mem_mib)
                .values(mem_floor_mib=mem_mib, change_seq=next_change(connection))
            )


class Profiles(Subject):
    """``store.profiles``."""

    def get(self, token: str, gpu_model: str | None = None) -> Profile | None:
        """The token's profile on a GPU model, or where it was updated last."""
        return self.of({token}, gpu_model).get(token)

    def of(self, tokens: Collection[str], gpu_model: str | None = None) -> dict[str, Profile]:
        """The profiles of `tokens` on a GPU model, or each where it was updated last; unknown tokens are absent."""
        profiles = self._of_all_models(tokens)
        return {p.token: p for p in profiles if gpu_model is None or p.gpu_model == gpu_model}

    def by_model(self, tokens: Collection[str]) -> dict[str, dict[str, Profile]]:
        """The profiles of `tokens`, by GPU model and then by token."""
        found: dict[str, dict[str, Profile]] = {}
        for profile in self._of_all_models(tokens):
            found.setdefault(profile.gpu_model, {})[profile.token] = profile
        return found

    def _of_all_models(self, tokens: Collection[str]) -> list[Profile]:
        """The one that was updated last comes last."""
        query = _PROFILES.order_by(_p.updated_s)
        with self._db.read() as connection:
            return list(map(_profile, select_in(connection, query, _p.token, tokens)))

    def all(self, gpu_model: str | None = None) -> Iterator[Profile]:
        """Every profile (of one GPU model), in order of token."""
        query = _PROFILES.order_by(_p.token, _p.gpu_model)
        if gpu_model is not None:
            query = query.where(_p.gpu_model == gpu_model)
        with self._db.read() as connection:
            yield from map(_profile, connection.execute(query))

    def unassigned(self) -> list[Profile]:
        """Profiles that are new or changed since they were given a cluster, so many that they fit into memory."""
        query = _PROFILES.where(_p.needs_cluster == 1).limit(_UNASSIGNED_AT_ONCE)
        with self._db.read() as connection:
            return list(map(_profile, connection.execute(query)))

    def assign(self, assignments: Collection[Assignment]) -> None:
        """Record clusters, all in one transaction: the hook's file then has all of them or none."""
        with self._db.write() as connection:
            assign(connection, assignments)


_p, _w = schema.profile.c, schema.workload.c
_PROFILES: Select[Any] = select(schema.profile, _w.owner_uid, _w.mem_floor_mib).join_from(
    schema.profile, schema.workload, _p.token == _w.token
)


def _profile(row: Row[Any]) -> Profile:
    values = {name: getattr(row, name) for name in Profile.__slots__}
    values |= {name: json.loads(values[name]) for name in ("features", "scatter")}
    return Profile(**values | {"mem_used_mib": max(row.mem_used_mib, row.mem_floor_mib)})


def owners_of(connection: Connection, tokens: Collection[str]) -> dict[str, int]:
    """Whose tokens these are; one that is nobody's is absent."""
    rows = select_in(connection, select(_w.token, _w.owner_uid), _w.token, tokens)
    return {row.token: row.owner_uid for row in rows}


def claim(connection: Connection, owners: Mapping[str, int], most: int | None = None) -> dict[str, int]:
    """The owner of each token. `owners` says who uses it: a token that nobody owns yet becomes that user's.

    With `most`, a user who owns that many tokens gets no more: the token is then absent from the answer.
    """
    w, wanted = schema.workload, sorted(owners)
    found = owners_of(connection, wanted)
    new = [token for token in wanted if token not in found]
    if most is not None:
        new = _within(connection, new, owners, most)
    if new:
        seq, now_s = next_change(connection), int(time.time())
        rows_to_add = [
            {"token": t, "owner_uid": owners[t], "created_s": now_s, "mem_floor_mib": 0, "change_seq": seq} for t in new
        ]
        insert_many(connection, w, rows_to_add)
    return found | {token: owners[token] for token in new}


def _within(connection: Connection, new: Sequence[str], owners: Mapping[str, int], most: int) -> list[str]:
    """Of new tokens those that their users may still have."""
    query = select(_w.owner_uid, func.count().label("tokens")).group_by(_w.owner_uid)
    counted = select_in(connection, query, _w.owner_uid, {owners[token] for token in new})
    had: Counter[int] = Counter({row.owner_uid: row.tokens for row in counted})
    allowed = []
    for token in new:
        had[owners[token]] += 1
        if had[owners[token]] <= most:
            allowed.append(token)
    return allowed


def touch(connection: Connection, tokens: Collection[str], **values: object) -> None:
    """Give these workloads the new values, if any, and mark them as changed for the hook's file."""
    if not tokens:
        return
    w, seq = schema.workload, next_change(connection)
    for some in chunks(sorted(tokens)):
        connection.execute(update(w).where(w.c.token.in_(some)).values(change_seq=seq, **values))


def to_measure(connection: Connection) -> set[str]:
    """Tokens that must be measured anew before they share."""
    return set(connection.scalars(select(_w.token).where(_w.measure_since_s.is_not(None))))


def marks(connection: Connection, tokens: Collection[str]) -> dict[str, int]:
    """Of these tokens those that must be measured anew, each with the time since when."""
    query = select(_w.token, _w.measure_since_s).where(_w.measure_since_s.is_not(None))
    return {row.token: row.measure_since_s for row in select_in(connection, query, _w.token, tokens)}


def measure_anew(connection: Connection, tokens: Mapping[str, int]) -> None:
    """These tokens share only after a run on a whole card that begins at that time or later."""
    w = schema.workload
    for token, since_s in tokens.items():
        connection.execute(update(w).where(w.c.token == token).values(measure_since_s=since_s))
    touch(connection, tokens)


def assign(connection: Connection, assignments: Collection[Assignment]) -> None:
    """`Profiles.assign` inside a transaction that is already open."""
    if not assignments:
        return
    p = schema.profile
    here = (p.c.token == bindparam("b_token"), p.c.gpu_model == bindparam("b_model"))
    rows = [{"b_token": a.token, "b_model": a.gpu_model, "cluster": a.cluster} for a in assignments]
    connection.execute(update(p).where(*here).values(needs_cluster=0), rows)
    touch(connection, {a.token for a in assignments})


MODEL_PREFIX = "gpu."
"""``gpu.V100`` counts the records of nodes that named this model."""
_LIKE_A_CARD = re.compile(r"[A-Z]+\d+[A-Z]*")


def own_name(site_name: str) -> str:
    """What the cards of a model most likely call themselves."""
    return gpu_model(site_name) or site_name.upper()


def own_names(site_names: Sequence[str], reported: Collection[str]) -> dict[str, str]:
    """The cards' own name by the site's. `reported` are the models that nodes have named in records.

    A site with one model may call it what no card is called (``volta``), as long as its nodes report a single one.
    """
    names = {name: own_name(name) for name in site_names}
    if len(names) == 1 and len(reported) == 1 and not any(map(_LIKE_A_CARD.fullmatch, names.values())):
        return dict.fromkeys(names, next(iter(reported)))
    return names


def reported_models(connection: Connection) -> set[str]:
    """The models that nodes have named in records."""
    c = schema.counter.c
    found = connection.scalars(select(c.name).where(c.name.startswith(MODEL_PREFIX, autoescape=True)))
    return {name.removeprefix(MODEL_PREFIX) for name in found}


def models_of(database: Database, site_names: Sequence[str]) -> dict[str, str]:
    """`own_names`, by what the nodes of this store have reported."""
    with database.read() as connection:
        return own_names(site_names, reported_models(connection))
