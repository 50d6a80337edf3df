"""The transaction that takes opened records in, once each, whatever happened before or happens next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, delete, select, update

from slurm_gpushare.protocol.record import Record, RecordKind
from slurm_gpushare.protocol.record_json import encode_record
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.combine import Numbers, features_of
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.gpu_models import MODEL_PREFIX
from slurm_gpushare.store.refine import forget_runs, uncount
from slurm_gpushare.store.statements import delete_in, select_in

_NO_NODE = "user"  # stands where a user's record names a node: nothing that a user can choose is kept


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """What is kept of a record, who made it, and where it lies.

    Not the record itself: the statistics of a whole batch would be much to hold, and only `body` needs them.
    """

    author_uid: int
    by_node: bool
    kind: RecordKind
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

    @classmethod
    def of(
        cls, record: Record, payload: str, author_uid: int, by_node: bool, inbox_id: int | None = None
    ) -> KeptRecord:
        """What is kept of a record: a node's as it is, a user's without the node that it names."""
        if not by_node:
            record = replace(record, node=_NO_NODE)
            payload = encode_record(record)
        return cls(
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

    @property
    def run(self) -> tuple[int, str]:
        return self.author_uid, self.run_id


def take_in(database: Database, records: Sequence[KeptRecord], done_inbox: Sequence[int] = ()) -> Counter[str]:
    """Keep the records and remove their inbox rows, all in one transaction; returns what became of them.

    Exactly once: a final record is known by author and run, in the same transaction that keeps it. Seen again,
    with the same or a lower sequence number, it changes nothing; a higher one replaces it. An interim record
    only ever replaces a lower one, and none once the final is here.
    """
    with database.write() as connection:
        known = _known_runs(connection, records)
        counts: Counter[str] = Counter()
        finals = list(_newest(records, RecordKind.FINAL))
        counts["duplicate"] = sum(item.kind is RecordKind.FINAL for item in records) - len(finals)
        fresh = [item for item in finals if item.seq > known.get(item.run, -1)]
        counts["duplicate"] += len(finals) - len(fresh)
        counts["final"] = len(fresh)
        _keep_finals(connection, fresh, known)
        ended = known.keys() | {item.run for item in fresh}
        interims = [item for item in _newest(records, RecordKind.INTERIM) if item.run not in ended]
        counts["interim"] = _keep_interims(connection, interims)
        for item in fresh:
            if item.by_node and item.gpu_model:
                counts[MODEL_PREFIX + item.gpu_model] += 1
        statements.add(connection, {name: count for name, count in counts.items() if count})
        rows = [*done_inbox, *(item.inbox_id for item in records if item.inbox_id is not None)]
        delete_in(connection, schema.inbox.c.id, rows)
    return counts


def insert_runs(connection: Connection, records: Sequence[KeptRecord]) -> None:
    """Add runs that wait for their token, with their numbers. An earlier record of the same run goes."""
    _forget_runs(connection, records)
    if not records:
        return
    records = sorted(records, key=lambda item: item.end_s)  # ids then follow time within a batch
    insert_many(connection, schema.run, [_run_row(item) for item in records])
    ids = _ids(connection, records)
    details = [{"id": ids[item.run], "features": json.dumps(item.features), "body": item.body} for item in records]
    insert_many(connection, schema.run_detail, details)


def _newest(records: Sequence[KeptRecord], kind: RecordKind) -> Iterator[KeptRecord]:
    """Of each run in the batch, the record that says most."""
    latest: dict[tuple[int, str], KeptRecord] = {}
    for item in records:
        if item.kind is kind and (item.run not in latest or item.seq > latest[item.run].seq):
            latest[item.run] = item
    return iter(latest.values())


def _known_runs(connection: Connection, records: Sequence[KeptRecord]) -> dict[tuple[int, str], int]:
    g = schema.ingested.c
    query = select(g.author_uid, g.run_id, g.seq)
    query = query.where(g.author_uid.in_({item.author_uid for item in records}))
    rows = select_in(connection, query, g.run_id, {item.run_id for item in records})
    return {(row.author_uid, row.run_id): row.seq for row in rows}


def _keep_finals(connection: Connection, records: Sequence[KeptRecord], known: dict[tuple[int, str], int]) -> None:
    g = schema.ingested
    insert_runs(connection, records)
    new = [item for item in records if item.run not in known]
    insert_many(connection, g, [_row(item, g.c.keys()) for item in new])
    for item in records:
        if item.run in known:
            connection.execute(
                update(g)
                .where(g.c.author_uid == item.author_uid, g.c.run_id == item.run_id)
                .values(seq=item.seq, end_s=item.end_s)
            )
    delete_in(connection, schema.interim.c.run_id, [item.run_id for item in records if item.by_node])


def _keep_interims(connection: Connection, records: Sequence[KeptRecord]) -> int:
    i = schema.interim
    query = select(i.c.job_id, i.c.node, i.c.gpu_index, i.c.run_id, i.c.seq, i.c.at_s)
    rows = select_in(connection, query, i.c.job_id, {item.job_id for item in records})
    held = {(row.job_id, row.node, row.gpu_index): (row.run_id, row.seq, row.at_s) for row in rows}
    newer: dict[tuple[int, str, int], KeptRecord] = {}
    for item in records:
        key = (item.job_id, item.node, item.gpu_index)
        other = newer.get(key)
        run_id, seq, at_s = (other.run_id, other.seq, other.end_s) if other else held.get(key, ("", -1, -1.0))
        if item.seq > seq if item.run_id == run_id else item.end_s > at_s:
            newer[key] = item
    for key in newer:
        if key in held:
            connection.execute(delete(i).where(i.c.job_id == key[0], i.c.node == key[1], i.c.gpu_index == key[2]))
    insert_many(connection, i, [_row(item, _INTERIM) | {"at_s": item.end_s} for item in newer.values()])
    return len(newer)


def _forget_runs(connection: Connection, records: Sequence[KeptRecord]) -> None:
    ids = _ids(connection, records).values()
    uncount(connection, ids)
    forget_runs(connection, ids)


def _ids(connection: Connection, records: Sequence[KeptRecord]) -> dict[tuple[int, str], int]:
    r = schema.run.c
    query = select(r.id, r.author_uid, r.run_id).where(r.author_uid.in_({item.author_uid for item in records}))
    rows = select_in(connection, query, r.run_id, {item.run_id for item in records})
    found = {(row.author_uid, row.run_id): row.id for row in rows}
    return {item.run: found[item.run] for item in records if item.run in found}


_RUN = (
    "author_uid", "run_id", "seq", "token", "job_id", "gpu_index", "start_s", "end_s", "alone_s", "shared_s",
)  # fmt: skip
_INTERIM = ("job_id", "node", "gpu_index", "author_uid", "run_id", "seq", "body")


def _row(item: KeptRecord, columns: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in columns}


def _run_row(item: KeptRecord) -> dict[str, Any]:
    where = {"node": item.node if item.by_node else "", "gpu_model": item.gpu_model or ""}
    return {"state": "waiting", "by_node": int(item.by_node), **where, **_row(item, _RUN)}
