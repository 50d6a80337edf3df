"""The transaction that takes opened records in, once each, whatever happened before or happens next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Table, delete, select, update

from slurm_gpushare.store import counters, schema
from slurm_gpushare.store.combine import Numbers, features_of
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.refine import uncount
from slurm_gpushare.telemetry.record import Kind, Record

_CHUNK = 400
_NO_NODE = "user"  # stands where a user's record names a node: nothing that a user can choose is kept
MODEL_PREFIX = "gpu."
"""``gpu.V100`` counts the records of nodes by GPU model."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What is kept of a record, who made it, and where it lies.

    Not the record itself: the statistics of a whole batch would be much to hold, and only `body` needs them.
    """

    author_uid: int
    by_node: bool
    kind: Kind
    run_id: str
    seq: int
    token: str | None
    job_id: int
    node: str
    gpu_index: int
    gpu_model: str | None
    start_s: float
    end_s: float
    alone_s: float
    shared_s: float
    features: Numbers
    body: str
    inbox_id: int | None = None

    @property
    def run(self) -> tuple[int, str]:
        return self.author_uid, self.run_id


def letter(record: Record, payload: str, author_uid: int, by_node: bool, inbox_id: int | None = None) -> Letter:
    """What is kept of a record: a node's as it is, a user's without the node that it names."""
    if not by_node:
        record = replace(record, node=_NO_NODE)
        payload = record.to_json()
    return Letter(
        author_uid=author_uid,
        by_node=by_node,
        kind=record.kind,
        run_id=record.run_id,
        seq=record.seq,
        token=record.token,
        job_id=record.job_id,
        node=record.node,
        gpu_index=record.gpu_index,
        gpu_model=record.gpu_model,
        start_s=record.start_s,
        end_s=record.end_s,
        alone_s=record.alone_s,
        shared_s=record.shared_s,
        features=features_of(record),
        body=payload,
        inbox_id=inbox_id,
    )


def take_in(database: Database, letters: Sequence[Letter], done_inbox: Sequence[int] = ()) -> Counter[str]:
    """Keep the letters and remove their inbox rows, all in one transaction; returns what became of them.

    Exactly once: a final record is known by author and run, in the same transaction that keeps it. Seen again,
    with the same or a lower sequence number, it changes nothing; a higher one replaces it. An interim record
    only ever replaces a lower one, and none once the final is here.
    """
    with database.write() as connection:
        known = _known_runs(connection, letters)
        counts: Counter[str] = Counter()
        finals = list(_newest(letters, Kind.FINAL))
        counts["duplicate"] = sum(item.kind is Kind.FINAL for item in letters) - len(finals)
        fresh = [item for item in finals if item.seq > known.get(item.run, -1)]
        counts["duplicate"] += len(finals) - len(fresh)
        counts["final"] = len(fresh)
        _keep_finals(connection, fresh, known)
        ended = known.keys() | {item.run for item in fresh}
        interims = [item for item in _newest(letters, Kind.INTERIM) if item.run not in ended]
        counts["interim"] = _keep_interims(connection, interims)
        for item in fresh:
            if item.by_node and item.gpu_model:
                counts[MODEL_PREFIX + item.gpu_model] += 1
        counters.add(connection, {name: count for name, count in counts.items() if count})
        rows = [*done_inbox, *(item.inbox_id for item in letters if item.inbox_id is not None)]
        _delete(connection, schema.inbox, "id", rows)
    return counts


def insert_runs(connection: Connection, letters: Sequence[Letter]) -> None:
    """Add runs that wait for their token, with their numbers. An earlier record of the same run goes."""
    _forget_runs(connection, letters)
    if not letters:
        return
    letters = sorted(letters, key=lambda item: item.end_s)  # ids then follow time within a batch
    insert_many(connection, schema.run, [_run_row(item) for item in letters])
    ids = _ids(connection, letters)
    details = [{"id": ids[item.run], "features": json.dumps(item.features), "body": item.body} for item in letters]
    insert_many(connection, schema.run_detail, details)


def _newest(letters: Sequence[Letter], kind: Kind) -> Iterator[Letter]:
    """Of each run in the batch, the record that says most."""
    latest: dict[tuple[int, str], Letter] = {}
    for item in letters:
        if item.kind is kind and (item.run not in latest or item.seq > latest[item.run].seq):
            latest[item.run] = item
    return iter(latest.values())


def _known_runs(connection: Connection, letters: Sequence[Letter]) -> dict[tuple[int, str], int]:
    g = schema.ingested.c
    query = select(g.author_uid, g.run_id, g.seq)
    found: dict[tuple[int, str], int] = {}
    for chunk in _chunks(sorted({item.run_id for item in letters})):
        for row in connection.execute(
            query.where(g.run_id.in_(chunk), g.author_uid.in_({i.author_uid for i in letters}))
        ):
            found[row.author_uid, row.run_id] = row.seq
    return found


def _keep_finals(connection: Connection, letters: Sequence[Letter], known: dict[tuple[int, str], int]) -> None:
    g = schema.ingested
    insert_runs(connection, letters)
    new = [item for item in letters if item.run not in known]
    insert_many(connection, g, [_ingested_row(item) for item in new])
    for item in letters:
        if item.run in known:
            connection.execute(
                update(g)
                .where(g.c.author_uid == item.author_uid, g.c.run_id == item.run_id)
                .values(seq=item.seq, end_s=item.end_s)
            )
    _delete(connection, schema.interim, "run_id", [item.run_id for item in letters if item.by_node])


def _keep_interims(connection: Connection, letters: Sequence[Letter]) -> int:
    i = schema.interim
    held: dict[tuple[int, str, int], tuple[str, int, float]] = {}
    for chunk in _chunks(sorted({item.job_id for item in letters})):
        for row in connection.execute(
            select(i.c.job_id, i.c.node, i.c.gpu_index, i.c.run_id, i.c.seq, i.c.at_s).where(i.c.job_id.in_(chunk))
        ):
            held[row.job_id, row.node, row.gpu_index] = (row.run_id, row.seq, row.at_s)
    newer: dict[tuple[int, str, int], Letter] = {}
    for item in letters:
        key = (item.job_id, item.node, item.gpu_index)
        other = newer.get(key)
        run_id, seq, at_s = (other.run_id, other.seq, other.end_s) if other else held.get(key, ("", -1, -1.0))
        if item.seq > seq if item.run_id == run_id else item.end_s > at_s:
            newer[key] = item
    for key in newer:
        if key in held:
            connection.execute(delete(i).where(i.c.job_id == key[0], i.c.node == key[1], i.c.gpu_index == key[2]))
    insert_many(connection, i, [_interim_row(item) for item in newer.values()])
    return len(newer)


def _forget_runs(connection: Connection, letters: Sequence[Letter]) -> None:
    ids = list(_ids(connection, letters).values())
    uncount(connection, ids)
    _delete(connection, schema.run_detail, "id", ids)
    _delete(connection, schema.run, "id", ids)


def _ids(connection: Connection, letters: Sequence[Letter]) -> dict[tuple[int, str], int]:
    r = schema.run.c
    found: dict[tuple[int, str], int] = {}
    authors = {item.author_uid for item in letters}
    for chunk in _chunks([item.run_id for item in letters]):
        query = select(r.id, r.author_uid, r.run_id).where(r.author_uid.in_(authors), r.run_id.in_(chunk))
        found.update(((row.author_uid, row.run_id), row.id) for row in connection.execute(query).all())
    return {item.run: found[item.run] for item in letters if item.run in found}


def _delete(connection: Connection, table: Table, column: str, values: Sequence[Any]) -> None:
    for chunk in _chunks(values):
        connection.execute(delete(table).where(table.c[column].in_(chunk)))


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[at : at + _CHUNK] for at in range(0, len(values), _CHUNK))


def _run_row(item: Letter) -> dict[str, Any]:
    return {
        "state": "waiting",
        "by_node": int(item.by_node),
        "author_uid": item.author_uid,
        "run_id": item.run_id,
        "seq": item.seq,
        "token": item.token,
        "job_id": item.job_id,
        "node": item.node if item.by_node else "",
        "gpu_index": item.gpu_index,
        "gpu_model": item.gpu_model or "",
        "start_s": item.start_s,
        "end_s": item.end_s,
        "alone_s": item.alone_s,
        "shared_s": item.shared_s,
    }


def _ingested_row(item: Letter) -> dict[str, Any]:
    return {"author_uid": item.author_uid, "run_id": item.run_id, "seq": item.seq, "end_s": item.end_s}


def _interim_row(item: Letter) -> dict[str, Any]:
    return {
        "job_id": item.job_id,
        "node": item.node,
        "gpu_index": item.gpu_index,
        "author_uid": item.author_uid,
        "run_id": item.run_id,
        "seq": item.seq,
        "at_s": item.end_s,
        "body": item.body,
    }
