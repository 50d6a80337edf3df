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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.record import RecordError, RecordKind, Scope, parse_record
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.store import statements
from slurm_gpushare.store.credential import CredentialError, OpenCredential, Sealed
from slurm_gpushare.store.intake import KeptRecord, give_up, promote, settle, take_in, waiting_jobs
from slurm_gpushare.store.maintenance import APART_S, present_s
from slurm_gpushare.store.refine import Settled
from slurm_gpushare.store.spool import Arrival, Refusal, Spool, read_record
from slurm_gpushare.store.statements import chunks
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import MODEL_PREFIX

log = logging.getLogger(__name__)

TokenLookup = Callable[[Collection[int]], Mapping[int, OwnedToken]]
"""Asks Slurm about jobs, in the queue and then in accounting. One that is absent is asked for again later."""

BATCH = 1000
MOST_A_RUN = 5000
"""Records that one run takes in, so that a tick of the helper is never long; the rest waits for the next."""
JOBS_ASKED_A_RUN = 5000
USER_RECORDS_A_DAY = 200
"""More of one user's own records are refused: a profile rests on nine."""
_TOLD_A_RUN = 10
_OPENERS, _PART = 4, 25
_DAY_S = 86_400.0
_GIVE_UP_S = 30 * _DAY_S
_GIVE_UP_USERS_S = _DAY_S  # a user's own record names a job of that user's, which Slurm knows at once
_STALE_S = 900.0  # thirty missed interim records: the sampler is gone
_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 3600.0


@dataclass(slots=True)
class IngestSummary(Settled):
    """What one call did; counts also ``final``, ``interim``, ``duplicate``, ``rejected`` and ``ignored``."""

    waiting: int = 0
    """Jobs whose records wait until Slurm knows them."""
    more: bool = False
    """Whether there was more than one run takes in."""


class _Later(Enum):
    """A record that ended more than a day from now."""

    TOO_NEW = auto()


_LATER = _Later.TOO_NEW
_LATER_S = 60.0
_Checked = KeptRecord | Refusal | _Later | None


@dataclass(slots=True)
class _Patience:
    """When to ask Slurm again about a job whose runs wait: ever more rarely, to spare slurmdbd."""

    runs: int = 0
    """More of them are a reason to ask at once."""
    next_s: float = 0.0
    wait_s: float = _FIRST_WAIT_S


class Ingest:
    """Takes records in. The helper keeps one and calls it each tick; ``gpushare db ingest`` calls it once."""

    def __init__(
        self,
        store: Store,
        spool_dir: Path,
        open_credential: OpenCredential,
        job_tags: TokenLookup,
        *,
        node_uids: Collection[int] = (0,),
        gpu_models: Collection[str] = (),
    ) -> None:
        """`node_uids` speak for nodes; users' records may name `gpu_models` and those that nodes have reported."""
        self._store = store
        self._spool = Spool(spool_dir, node_uids)
        self._open = open_credential
        self._job_tags = job_tags
        self._node_uids = frozenset(node_uids)
        self._gpu_models = frozenset(gpu_models)
        self._patience: dict[int, _Patience] = {}
        self._today = 0
        self._looked_s = self._promote_from_s = 0.0
        self._later: dict[Path | int, float] = {}
        """Records from the future, by file or row: when to look again, by the monotonic clock."""
        self._by_user: Counter[int] = Counter()

    def run_all(self) -> IngestSummary:
        """`run` until everything that has arrived is taken in."""
        summary = self.run()
        while summary.more:
            following = self.run()
            summary.add(following)
            summary.waiting, summary.more = following.waiting, following.more
        return summary

    def run(self, now_s: float | None = None) -> IngestSummary:
        """Take in what has arrived, up to `MOST_A_RUN` records, then settle what can be settled."""
        now_s = time.time() if now_s is None else now_s
        summary = IngestSummary()
        if not 0.0 <= now_s - self._looked_s < APART_S:  # a start, or the clock jumped: nobody has been silent yet
            self._promote_from_s = now_s + _STALE_S
        self._looked_s = now_s
        self._later = {key: until_s for key, until_s in self._later.items() if until_s > time.monotonic()}
        if self._today != int(now_s / _DAY_S):
            self._today = int(now_s / _DAY_S)
            self._by_user.clear()
        self._take_files(now_s, summary)
        self._take_inbox(now_s, summary)
        if now_s >= self._promote_from_s:
            promote(self._store.database, now_s - _STALE_S)
        settled = self._settle(now_s)
        summary.add(settled)
        summary.waiting = len(self._patience)
        for line in settled.restarts:
            log.info("profile restarted: %s", line)
        return summary

    def _take_files(self, now_s: float, summary: IngestSummary) -> None:
        paths = self._spool.look()
        for some in chunks([path for path in paths if path not in self._later][:MOST_A_RUN], BATCH):
            arrived = [item for path in some if (item := read_record(path)) is not None]
            if arrived:
                self._batch(arrived, now_s, summary)
        summary.more = len(paths) > MOST_A_RUN or not self._spool.all_seen
        if summary.counts["rejected"]:
            self._spool.prune_rejected()
        removed, self._spool.counts = self._spool.counts, Counter()
        if removed:
            log.warning("spool: %s", ", ".join(f"{count} {_REMOVED[name]}" for name, count in sorted(removed.items())))
            self._store.counters.add(removed)
            summary.counts.update(removed)

    def _take_inbox(self, now_s: float, summary: IngestSummary) -> None:
        taken = after = 0
        while taken < MOST_A_RUN and (arrived := self._store.inbox.take(BATCH, after)):
            due = [item for item in arrived if item.inbox_id not in self._later]
            self._batch(due, now_s, summary)
            taken, after = taken + len(due), arrived[-1].inbox_id or 0
        summary.more = summary.more or taken >= MOST_A_RUN

    def _batch(self, arrived: Sequence[Arrival | Refusal], now_s: float, summary: IngestSummary) -> None:
        models, horizon_s = self._bounds()
        checked = [self._check(item, models, horizon_s, now_s) for item in self._opened(arrived)]
        found = list(zip(arrived, checked, strict=True))
        if late := [item for item, result in found if result is _LATER]:
            # They wait where they are: this machine's clock may be the wrong one.
            until_s = time.monotonic() + _LATER_S
            self._later |= {item.path or item.inbox_id or 0: until_s for item in late}
            summary.counts["too_new"] += len(late)
            log.warning("%d records wait: they are from the future, by this machine's clock", len(late))
            found = [(item, result) for item, result in found if result is not _LATER]
        records = [result for _, result in found if isinstance(result, KeptRecord)]
        refused = [result for _, result in found if isinstance(result, Refusal)]
        ignored = checked.count(None)
        done = [item.inbox_id for item, _ in found if item.inbox_id is not None]
        counts = take_in(self._store.database, records, done)
        counts.update(rejected=len(refused), ignored=ignored)
        for number, refusal in enumerate(refused):
            if number < _TOLD_A_RUN:
                log.warning("record rejected: %s: %s", _shown(refusal.path), refusal.reason)
            if refusal.path is not None:
                self._spool.reject(refusal.path, refusal.reason)
        for item, result in found:
            if isinstance(item, Arrival) and item.path is not None and not isinstance(result, Refusal):
                self._spool.done(item)
        self._store.counters.add({name: n for name, n in (("rejected", len(refused)), ("ignored", ignored)) if n})
        summary.counts.update({name: count for name, count in counts.items() if not name.startswith(MODEL_PREFIX)})

    def _bounds(self) -> tuple[frozenset[str], int]:
        known = self._store.counters.all()
        seen = {name.removeprefix(MODEL_PREFIX) for name in known if name.startswith(MODEL_PREFIX)}
        return self._gpu_models | seen, known.get(statements.PRUNED_BEFORE, 0)

    def _opened(self, arrived: Sequence[Arrival | Refusal]) -> list[tuple[Arrival, Sealed] | Refusal]:
        """The contents of credentials. Most of this is waiting for munged, so several threads wait at once."""
        parts = chunks(arrived, _PART)
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
    ) -> _Checked:
        """A record to keep, a refusal, `_LATER`, or None for a record that is fine and of no use."""
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
            return _LATER
        elif record.end_s < horizon_s:
            reason = "older than what the store remembers"
        elif not by_node and self._is_over_quota(sealed.uid):
            reason = f"more than {USER_RECORDS_A_DAY} records of this user today"
        if reason:
            return Refusal(reason, item.path, item.inbox_id)
        if not by_node and record.kind is RecordKind.INTERIM:
            return None
        return KeptRecord.of(record, sealed.payload.decode("ascii").strip(), sealed.uid, by_node)

    def _is_over_quota(self, uid: int) -> bool:
        """Count one more record of a user's own, by the uid that munge has proven."""
        self._by_user[uid] += 1
        return self._by_user[uid] > USER_RECORDS_A_DAY

    def _is_due(self, job: int, runs: int, now_s: float) -> bool:
        patience = self._patience.get(job)
        if patience is None or patience.runs != runs:
            return True
        return not now_s < patience.next_s <= now_s + _LONGEST_WAIT_S  # a clock that jumped back keeps nobody waiting

    def _settle(self, now_s: float) -> Settled:
        database = self._store.database
        jobs = waiting_jobs(database)
        if not jobs:
            self._patience.clear()
            return Settled()
        due = [job for job in jobs if self._is_due(job, jobs[job], now_s)][:JOBS_ASKED_A_RUN]
        try:
            tags = self._job_tags(due) if due else {}
        except GpushareError as why:
            log.warning("records wait: %s", why)
            tags = {}
        settled = settle(database, tags)
        waiting = waiting_jobs(database)  # some of those that Slurm knows still wait for their node's record
        self._patience = {job: state for job, state in self._patience.items() if job in waiting}
        for job in waiting.keys() & set(due):
            state = self._patience.setdefault(job, _Patience())
            state.runs, state.next_s = waiting[job], now_s + state.wait_s
            state.wait_s = min(2 * state.wait_s, _LONGEST_WAIT_S)
        old_s = present_s(database, now_s)
        give_up(database, old_s - _GIVE_UP_S, old_s - _GIVE_UP_USERS_S)
        return settled


_REMOVED = {
    "excess": "files removed unread: their users have too many waiting",
    "unkept": "rejected files removed",
    "stray": "strays removed",
    "stuck": "entries that cannot be removed ('gpushare doctor' names them)",
}


def _shown(path: Path | None) -> str:
    """A file's name for the log. It is the user's: short, and without anything that a terminal would obey."""
    return "inbox" if path is None else ascii(path.name[:60])
