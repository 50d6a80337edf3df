"""What becomes of opened records: they are taken in once each, then given their token.

A run waits until Slurm, asked on the controller since nodes never learn tokens, knows its job. Then it is counted for
the token's profile, kept beside it, or dropped: a job without a token took no part, so nothing of it is kept; a record
for somebody else's token counts nowhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from slurm_gpushare.protocol.record import Record, RecordKind, encode_record
from slurm_gpushare.protocol.tokens import TOKEN, OwnedToken
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.combine import Numbers, features_of
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.refine import RunNumbers, Settled, forget_runs, keep_curves, refine, uncount
from slurm_gpushare.store.statements import chunks, delete_in, select_in
from slurm_gpushare.store.workloads import MODEL_PREFIX, TOKENS_A_USER, claim, owners_of

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


OWN_RECORDS_A_RUN = 5000
WAITING_OF_A_JOB = 16
"""Users' own records of one job that may wait for the node's: who writes more has the first ones dropped."""


def waiting_jobs(database: Database) -> dict[int, int]:
    """How many runs wait for their token, by job: those that a node reported first, then users' own."""
    r = schema.run.c
    by_node = func.max(r.by_node)
    query = select(r.job_id, func.count()).where(r.state == "waiting").group_by(r.job_id)
    with database.read() as connection:
        return {row[0]: row[1] for row in connection.execute(query.order_by(by_node.desc(), r.job_id))}


def settle(database: Database, tags: Mapping[int, OwnedToken]) -> Settled:
    """Settle the waiting runs of the jobs in `tags`, and users' runs that name their token themselves."""
    result = Settled()
    # By token, so that a profile changes once for all of its new runs; then by job, since the first owns the token.
    jobs = sorted(tags, key=lambda job: (tags[job].token or "", job))
    for chunk in chunks(jobs):
        with database.write() as connection:
            result.add(_settle(connection, _waiting(connection, schema.run.c.job_id.in_(chunk)), tags))
    with database.write() as connection:
        own = _waiting(connection, schema.run.c.token.is_not(None), limit=OWN_RECORDS_A_RUN)
        result.add(_settle(connection, own, tags))
    return result


def give_up(database: Database, ended_before_s: float, users_before_s: float) -> int:
    """Stop asking Slurm about jobs that it has not known for long; their runs are kept as ``unresolved``."""
    r = schema.run
    late = or_(r.c.end_s < ended_before_s, and_(r.c.by_node == 0, r.c.end_s < users_before_s))
    with database.write() as connection:
        old = update(r).where(r.c.state == "waiting", late).values(state="unresolved")
        count = connection.execute(old).rowcount
        statements.add(connection, {"unresolved": count} if count else {})
    return count


def _waiting(connection: Connection, condition: Any, limit: int | None = None) -> Sequence[Any]:
    r = schema.run.c
    query = select(r.id, r.by_node, r.author_uid, r.token, r.job_id).where(r.state == "waiting", condition)
    return connection.execute(query.order_by(r.job_id, r.by_node.desc(), r.id).limit(limit)).all()


def _settle(connection: Connection, rows: Sequence[Any], tags: Mapping[int, OwnedToken]) -> Settled:
    result = Settled()
    if not rows:
        return result
    dropped: list[int] = []
    claims: dict[int, tuple[str, int]] = {}
    for row in rows:
        claimed = _claimed(row, tags.get(row.job_id))
        if isinstance(claimed, str):
            dropped.append(row.id)
            result.counts[claimed] += 1
        elif claimed is not None:
            claims[row.id] = claimed
    vouched = {row.id for row in rows if row.by_node}
    asked: dict[str, int] = {}
    for run_id, (token, uid) in claims.items():
        if run_id in vouched:
            asked.setdefault(token, uid)
    # A token becomes somebody's by a job that Slurm ran, never by a record that a user wrote.
    owners = claim(connection, asked, TOKENS_A_USER) | owners_of(
        connection, {token for token, _ in claims.values()} - asked.keys()
    )
    accepted: dict[int, str] = {}
    may_wait = _wait_for_their_node([row for row in rows if row.id in claims and not row.by_node], claims, tags)
    for run_id, (token, uid) in claims.items():
        if owners.get(token) == uid:
            accepted[run_id] = token
        elif token in owners or run_id not in may_wait:
            dropped.append(run_id)
            result.counts["foreign"] += 1
    forget_runs(connection, dropped)
    keep_curves(connection, {run_id: token for run_id, token in accepted.items() if run_id not in vouched})
    outranked = _outranked(connection, [row for row in rows if row.id in accepted], accepted)
    result.counts["outranked"] += len(outranked)
    _outrank(connection, outranked, accepted)
    fresh = _numbers(connection, {run_id: token for run_id, token in accepted.items() if run_id not in outranked})
    result.add(refine(connection, fresh))
    statements.add(connection, {name: count for name, count in result.counts.items() if count})
    return result


def _claimed(row: Any, tag: OwnedToken | None) -> tuple[str, int] | str | None:
    """Token and claimant of a run, or why it counts nowhere, or None while it must wait."""
    if row.token is not None:  # a user's own record says which of the user's workloads it is
        return row.token, row.author_uid
    if tag is None:
        return None
    if tag.token is None or not TOKEN.fullmatch(tag.token):
        return "untokened"
    if not row.by_node and row.author_uid != tag.uid:
        return "foreign"
    return tag.token, tag.uid


def _wait_for_their_node(
    rows: Sequence[Any], claims: Mapping[int, tuple[str, int]], tags: Mapping[int, OwnedToken]
) -> set[int]:
    """Users' own runs of jobs that Slurm knows under the same token and user, or has not been asked about now.

    Such a job's own record may be here before the node's, which then makes the token this user's. `give_up` ends it.
    """
    of_job: dict[int, list[int]] = {}
    for row in rows:
        if row.job_id not in tags or tuple(tags[row.job_id]) == claims[row.id]:
            of_job.setdefault(row.job_id, []).append(row.id)
    return {run_id for run_ids in of_job.values() for run_id in sorted(run_ids)[-WAITING_OF_A_JOB:]}


def _outranked(connection: Connection, rows: Sequence[Any], tokens: Mapping[int, str]) -> set[int]:
    """Users' runs for which a node's record of the same job and token exists, in this batch or before."""
    r = schema.run.c
    query = select(r.id, r.job_id, r.token, r.by_node).where(r.state.in_(("counted", "kept")), r.token.is_not(None))
    here = [(row.id, (row.job_id, tokens[row.id]), row.by_node) for row in rows]
    found = select_in(connection, query, r.job_id, {row.job_id for row in rows})
    here += [(row.id, (row.job_id, row.token), row.by_node) for row in found]
    vouched = {key for _, key, by_node in here if by_node}
    return {run_id for run_id, key, by_node in here if not by_node and key in vouched}


def _outrank(connection: Connection, run_ids: Collection[int], tokens: Mapping[int, str]) -> None:
    r = schema.run
    uncount(connection, run_ids)
    for run_id in run_ids:
        values = {"state": "outranked", "generation": None, **({"token": tokens[run_id]} if run_id in tokens else {})}
        connection.execute(update(r).where(r.c.id == run_id).values(values))


def _numbers(connection: Connection, tokens: Mapping[int, str]) -> list[RunNumbers]:
    """What profiles need of the runs, oldest first, each with the token that it was given."""
    r, d = schema.run.c, schema.run_detail.c
    query = select(r.id, r.gpu_model, r.by_node, r.start_s, r.end_s, r.shared_s, d.features).join_from(
        schema.run, schema.run_detail, r.id == d.id
    )
    rows = select_in(connection, query.order_by(r.id), r.id, tokens)
    return [RunNumbers.of(row, tokens[row.id]) for row in rows]
