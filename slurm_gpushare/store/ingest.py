"""Ingest: sealed records from the spool directory and the inbox become runs, profiles and live state.

The order of steps is what makes it exact, whatever dies when:

1. files are read, opened and checked; nothing has changed yet;
2. one transaction keeps a batch of records together with their ids (`intake`);
3. only then are the batch's files removed. Dying between 2 and 3 leaves files whose ids are known;
4. runs are given their token and change profiles, in transactions of their own (`settle`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import delete, select

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.store import counters, schema
from slurm_gpushare.store.arrivals import Arrival, Inbox, Refusal, Spool
from slurm_gpushare.store.credential import CredentialError, OpenCredential, Sealed
from slurm_gpushare.store.intake import MODEL_PREFIX, Letter, insert_runs, letter, take_in
from slurm_gpushare.store.settle import Settled, give_up, settle, waiting_jobs
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.tags import JobTags
from slurm_gpushare.telemetry.record import Kind, Scope, parse_record
from slurm_gpushare.telemetry.schema import RecordError

log = logging.getLogger(__name__)

BATCH = 1000
_OPENERS, _PART = 4, 25
_DAY_S = 86_400.0
_GIVE_UP_S = 30 * _DAY_S
_STALE_S = 900.0  # thirty missed interim records: the sampler is gone
_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 3600.0


@dataclass(slots=True)
class Summary:
    """What one call did."""

    counts: Counter[str] = field(default_factory=Counter)
    """``final``, ``interim``, ``duplicate``, ``rejected``, ``ignored``, and those of `Settled`."""
    restarts: list[str] = field(default_factory=list)
    waiting: int = 0
    """Jobs whose records wait until Slurm knows them."""


@dataclass(slots=True)
class _Patience:
    """When to ask Slurm again about a job that it did not know: ever more rarely, to spare slurmdbd."""

    next_s: float = 0.0
    wait_s: float = _FIRST_WAIT_S


class Ingest:
    """Takes records in. The helper keeps one and calls it each tick; ``gpushare ingest`` calls it once."""

    def __init__(
        self,
        store: Store,
        spool_dir: Path,
        open_credential: OpenCredential,
        job_tags: JobTags,
        *,
        node_uids: Collection[int] = (0,),
        gpu_models: Collection[str] = (),
    ) -> None:
        """`node_uids` speak for nodes; users' records may name `gpu_models` and those that nodes have reported."""
        self._store = store
        self._spool = Spool(spool_dir)
        self._open = open_credential
        self._job_tags = job_tags
        self._node_uids = frozenset(node_uids)
        self._gpu_models = frozenset(gpu_models)
        self._patience: dict[int, _Patience] = {}

    def run(self, now_s: float | None = None) -> Summary:
        """Take in everything that has arrived, then settle what can be settled."""
        now_s = time.time() if now_s is None else now_s
        summary = Summary()
        while arrived := self._arrived():
            self._batch(arrived, now_s, summary)
        self._promote(now_s)
        settled = self._settle(now_s)
        summary.counts.update(settled.counts)
        summary.restarts = settled.restarts
        summary.waiting = len(self._patience)
        for line in settled.restarts:
            log.info("profile restarted: %s", line)
        return summary

    def _arrived(self) -> list[Arrival | Refusal]:
        files = self._spool.take(BATCH)
        return files or list(Inbox(self._store.database).take(BATCH))

    def _batch(self, arrived: Sequence[Arrival | Refusal], now_s: float, summary: Summary) -> None:
        models, horizon_s = self._bounds()
        checked = [self._check(item, models, horizon_s, now_s) for item in self._opened(arrived)]
        letters = [item for item in checked if isinstance(item, Letter)]
        refused = [item for item in checked if isinstance(item, Refusal)]
        ignored = checked.count(None)
        gone = [item.inbox_id for item, result in zip(arrived, checked, strict=True)
                if item.inbox_id is not None and not isinstance(result, Letter)]  # fmt: skip
        counts = take_in(self._store.database, letters, gone)
        counts.update(rejected=len(refused), ignored=ignored)
        for refusal in refused:
            log.warning("record rejected: %s: %s", refusal.path or "inbox", refusal.reason)
            if refusal.path is not None:
                self._spool.reject(refusal.path, refusal.reason)
        for item, result in zip(arrived, checked, strict=True):
            if isinstance(item, Arrival) and item.path is not None and not isinstance(result, Refusal):
                self._spool.done(item)
        self._store.counters.add({name: n for name, n in (("rejected", len(refused)), ("ignored", ignored)) if n})
        summary.counts.update({name: count for name, count in counts.items() if not name.startswith(MODEL_PREFIX)})

    def _bounds(self) -> tuple[frozenset[str], int]:
        known = self._store.counters.all()
        seen = {name.removeprefix(MODEL_PREFIX) for name in known if name.startswith(MODEL_PREFIX)}
        return self._gpu_models | seen, known.get(counters.PRUNED_BEFORE, 0)

    def _opened(self, arrived: Sequence[Arrival | Refusal]) -> list[tuple[Arrival, Sealed] | Refusal]:
        """The contents of credentials. Most of this is waiting for munged, so several threads wait at once."""
        parts = [arrived[at : at + _PART] for at in range(0, len(arrived), _PART)]
        with ThreadPoolExecutor(_OPENERS) as pool:
            opened = pool.map(lambda part: [self._open_one(item) for item in part], parts)
            return [item for part in opened for item in part]

    def _open_one(self, item: Arrival | Refusal) -> tuple[Arrival, Sealed] | Refusal:
        if isinstance(item, Refusal):
            return item
        try:
            return item, self._open(item.credential)
        except CredentialError as why:
            return Refusal(why.what, item.path, item.inbox_id)

    def _check(
        self, opened: tuple[Arrival, Sealed] | Refusal, models: frozenset[str], horizon_s: float, now_s: float
    ) -> Letter | Refusal | None:
        """A letter to keep, a refusal, or None for a record that is fine and of no use."""
        if isinstance(opened, Refusal):
            return opened
        item, sealed = opened
        try:
            record = parse_record(sealed.payload)
        except RecordError as why:
            return Refusal(why.what, item.path, item.inbox_id)
        by_node = sealed.uid in self._node_uids and record.scope is Scope.JOB
        reason = None
        if not by_node and record.scope is Scope.JOB:
            reason = "a job's record that no node vouches for"
        elif not by_node and record.gpu_model is not None and record.gpu_model not in models:
            reason = "a user's record of a GPU model that no node has reported"
        elif record.end_s > now_s + _DAY_S:
            reason = "ended in the future"
        elif record.end_s < horizon_s:
            reason = "older than what the store remembers"
        if reason:
            return Refusal(reason, item.path, item.inbox_id)
        if not by_node and record.kind is Kind.INTERIM:
            return None
        return letter(record, sealed.payload.decode("ascii").strip(), sealed.uid, by_node, item.inbox_id)

    def _promote(self, now_s: float) -> None:
        """A sampler that died left no final record: its last interim one then speaks for the run."""
        i = schema.interim
        with self._store.database.read() as connection:
            if connection.scalar(select(i.c.job_id).where(i.c.at_s < now_s - _STALE_S).limit(1)) is None:
                return
        with self._store.database.write() as connection:
            rows = connection.execute(select(i).where(i.c.at_s < now_s - _STALE_S).limit(BATCH)).all()
            insert_runs(connection, [letter(parse_record(row.body), row.body, row.author_uid, True) for row in rows])
            for row in rows:
                key = (i.c.job_id == row.job_id, i.c.node == row.node, i.c.gpu_index == row.gpu_index)
                connection.execute(delete(i).where(*key))
            counters.add(connection, {"promoted": len(rows)})

    def _settle(self, now_s: float) -> Settled:
        database = self._store.database
        jobs = waiting_jobs(database)
        if not jobs:
            self._patience.clear()
            return Settled()
        due = [job for job in jobs if self._patience.get(job, _Patience()).next_s <= now_s]
        try:
            tags = self._job_tags(due) if due else {}
        except GpushareError as why:
            log.warning("records wait: %s", why)
            tags = {}
        settled = settle(database, tags)
        waiting = set(jobs) - tags.keys()
        self._patience = {job: state for job, state in self._patience.items() if job in waiting}
        for job in waiting & set(due):
            state = self._patience.setdefault(job, _Patience())
            state.next_s, state.wait_s = now_s + state.wait_s, min(2 * state.wait_s, _LONGEST_WAIT_S)
        give_up(database, now_s - _GIVE_UP_S)
        return settled
