"""What becomes of opened records: they are taken in once each, then given their token.

A run waits until Slurm, asked on the controller since nodes never learn tokens, knows its job. Then it is counted for
the token's profile, kept beside it, or dropped: a job without a token took no part, so nothing of it is kept; a record
for somebody else's token counts nowhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, update

from slurm_gpushare.protocol.record import Record, RecordKind, encode_record
from slurm_gpushare.protocol.tokens import TOKEN, OwnedToken
from slurm_gpushare.store import schema, statements
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.refine import RunNumbers, Settled, features_of, forget_runs, keep_curves, refine, uncount
from slurm_gpushare.store.schema import DROPPED, RUNNING, WAITING
from slurm_gpushare.store.statements import chunks, delete_in, select_in
from slurm_gpushare.store.workloads import MODEL_PREFIX, TOKENS_A_USER, claim, owners_of

RunKey = tuple[int, str]
"""Proven author, and the run's own id."""
_COPIED = ("run_id", "seq", "token", "job_id", "gpu_index", "start_s", "end_s", "alone_s", "shared_s")
_NO_NODE = "user"  # stands where a user's record names a node: nothing that a user can choose is kept


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """What is kept of a record: the row of its run, its numbers and its text.

    Not the record itself: the statistics of a whole batch would be much to hold.
    """

    row: Mapping[str, Any]
    """Columns of ``run``."""
    features: str
    body: str

    @classmethod
    def of(cls, record: Record, payload: str, author_uid: int, by_node: bool) -> KeptRecord:
        """What is kept of a record: a node's as it is, a user's without the node that it names."""
        if not by_node:
            record = replace(record, node=_NO_NODE)
            payload = encode_record(record)
        final = record.kind is RecordKind.FINAL
        row = {name: getattr(record, name) for name in _COPIED} | {
            "state": WAITING if final else RUNNING,
            "by_node": int(by_node),
            "author_uid": author_uid,
            "node": record.node if by_node else "",
            "gpu_model": record.gpu_model or "",
            "final": int(final),
        }
        return cls(row, json.dumps(features_of(record)), payload)

    @property
    def key(self) -> RunKey:
        return self.row["author_uid"], self.row["run_id"]

    @property
    def age(self) -> tuple[int, int]:
        """Of two records of a run the one of the higher age says more."""
        return self.row["final"], self.row["seq"]


def take_in(database: Database, records: Sequence[KeptRecord], done_inbox: Sequence[int] = ()) -> Counter[str]:
    """Keep the records and remove the inbox rows that are done, all in one transaction; returns what became of them.

    Exactly once: a record is known by author and run, in the same transaction that keeps it. Seen again, with the same
    or a lower sequence number, it changes nothing; a higher one replaces it, and a final record any interim one.
    """
    with database.write() as connection:
        known = {key: (row.final, row.seq) for key, row in _known(connection, records).items()}
        newest: dict[RunKey, KeptRecord] = {}
        for item in records:
            if item.age > known.get(item.key, (-1, -1)) and (item.key not in newest or item.age > newest[item.key].age):
                newest[item.key] = item
        finals = [item for item in newest.values() if item.row["final"]]
        seen = Counter(bool(item.row["final"]) for item in records)
        interims = [item for item in newest.values() if not item.row["final"]]
        counts = Counter(final=len(finals), duplicate=seen[True] - len(finals), interim=len(interims))
        _insert(connection, finals)
        _keep_interims(connection, interims)
        counts.update(
            MODEL_PREFIX + item.row["gpu_model"] for item in finals if item.row["by_node"] and item.row["gpu_model"]
        )
        statements.add(connection, {name: count for name, count in counts.items() if count})
        delete_in(connection, schema.inbox.c.id, done_inbox)
    return counts


def promote(database: Database, silent_since_s: float) -> None:
    """A sampler that died left no final record: its last interim one then speaks for the run."""
    r = schema.run
    silent = (r.c.state == RUNNING, r.c.end_s < silent_since_s)
    with database.read() as connection:
        if connection.scalar(select(r.c.id).where(*silent).limit(1)) is None:
            return
    with database.write() as connection:
        changed = connection.execute(update(r).where(*silent).values(state=WAITING))
        statements.add(connection, {"promoted": changed.rowcount})


def _known(connection: Connection, records: Sequence[KeptRecord]) -> dict[RunKey, Any]:
    """The rows of these runs that the store has."""
    r = schema.run.c
    query = select(r.id, r.author_uid, r.run_id, r.seq, r.final)
    query = query.where(r.author_uid.in_({item.row["author_uid"] for item in records}))
    rows = select_in(connection, query, r.run_id, {item.row["run_id"] for item in records})
    return {(row.author_uid, row.run_id): row for row in rows}


def _insert(connection: Connection, records: Sequence[KeptRecord]) -> None:
    """Add runs with their numbers. An earlier record of the same run goes."""
    if not records:
        return
    earlier = [row.id for row in _known(connection, records).values()]
    uncount(connection, earlier)
    forget_runs(connection, earlier)
    records = sorted(records, key=lambda item: item.row["end_s"])  # ids then follow time within a batch
    insert_many(connection, schema.run, [item.row for item in records])
    known = _known(connection, records)
    details = [{"id": known[item.key].id, "features": item.features, "body": item.body} for item in records]
    insert_many(connection, schema.run_detail, details)


def _keep_interims(connection: Connection, records: Sequence[KeptRecord]) -> None:
    """In place of their predecessors, whose ids they keep, and of another sampler's of the same job and card."""
    known = _known(connection, records)
    uncount(connection, [row.id for row in known.values()])  # one that was given up and is heard again
    r, d = schema.run, schema.run_detail
    for item in records:
        if item.key in known:
            here = known[item.key].id
            connection.execute(update(r).where(r.c.id == here).values(**item.row, generation=None, settled_seq=None))
            connection.execute(update(d).where(d.c.id == here).values(features=item.features, body=item.body))
    _insert(connection, [item for item in records if item.key not in known])
    query = select(r.c.id, r.c.job_id, r.c.node, r.c.gpu_index).where(r.c.state == RUNNING).order_by(r.c.end_s)
    last: dict[tuple[int, str, int], int] = {}
    superseded = []
    for row in select_in(connection, query, r.c.job_id, {item.row["job_id"] for item in records}):
        card = (row.job_id, row.node, row.gpu_index)
        superseded += [last[card]] if card in last else []
        last[card] = row.id
    forget_runs(connection, superseded)


OWN_RECORDS_A_RUN = 5000
WAITING_OF_A_JOB = 16
"""Users' own records of one job that may wait for the node's: who writes more has the first ones dropped."""


def waiting_jobs(database: Database) -> dict[int, int]:
    """How many runs wait for their token, by job: those that a node reported first, then users' own."""
    r = schema.run.c
    by_node = func.max(r.by_node)
    query = select(r.job_id, func.count()).where(r.state == WAITING).group_by(r.job_id)
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
        old = update(r).where(r.c.state == WAITING, late).values(state="unresolved")
        count = connection.execute(old).rowcount
        statements.add(connection, {"unresolved": count} if count else {})
    return count


def _waiting(connection: Connection, condition: Any, limit: int | None = None) -> Sequence[Any]:
    r = schema.run.c
    query = select(r.id, r.by_node, r.author_uid, r.token, r.job_id).where(r.state == WAITING, condition)
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
    _drop(connection, dropped)
    keep_curves(connection, {run_id: token for run_id, token in accepted.items() if run_id not in vouched})
    outranked = _outranked(connection, [row for row in rows if row.id in accepted], accepted)
    result.counts["outranked"] += len(outranked)
    _outrank(connection, outranked, accepted)
    fresh = _numbers(connection, {run_id: token for run_id, token in accepted.items() if run_id not in outranked})
    result.add(refine(connection, fresh))
    statements.add(connection, {name: count for name, count in result.counts.items() if count})
    return result


def _drop(connection: Connection, run_ids: Collection[int]) -> None:
    """Keep of these runs only what makes them count once, should their records come again."""
    r = schema.run
    nothing = {"state": DROPPED, "token": None, "job_id": 0, "node": "", "gpu_index": 0, "gpu_model": "",
               "start_s": r.c.end_s, "alone_s": 0.0, "shared_s": 0.0}  # fmt: skip
    for some in chunks(sorted(run_ids)):
        connection.execute(update(r).where(r.c.id.in_(some)).values(nothing))
    delete_in(connection, schema.run_detail.c.id, run_ids)


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
