"""The store as the rest of the package sees it: one object, one attribute for each subject."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any

from sqlalchemy import delete, func, select

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, Subject, insert_many
from slurm_gpushare.store.schema import known_migrations, migrate, require_current
from slurm_gpushare.store.sharing import Observations, SharingSpans, Violations
from slurm_gpushare.store.spool import Inbox, StopOrders
from slurm_gpushare.store.statements import Counters
from slurm_gpushare.store.stored_jobs import Decisions, InterimRecords, Jobs, Runs
from slurm_gpushare.store.workloads import Assignment, Profiles, Workloads, assign


class Store:
    """An open store. ``Store(config.store_url)`` refuses an empty, older or newer one; `Store.create` makes it ready.

    Safe to share between threads. Every call is one transaction.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.database = Database(url, read_only=read_only, must_exist=True)
        self.is_new = False
        """Whether there was none before: nothing is known yet."""
        require_current(self.database)
        self.workloads = Workloads(self.database)
        self.profiles = Profiles(self.database)
        self.runs = Runs(self.database)
        self.live = InterimRecords(self.database)
        self.knowledge = KnowledgeDocuments(self.database)
        self.observations = Observations(self.database)
        self.jobs = Jobs(self.database)
        self.sharing = SharingSpans(self.database)
        self.decisions = Decisions(self.database)
        self.violations = Violations(self.database)
        self.counters = Counters(self.database)
        self.inbox = Inbox(self.database)
        self.stop_orders = StopOrders(self.database)

    @classmethod
    def create(cls, url: str) -> Store:
        """Open a store, making it or bringing it to this release's schema first."""
        database = Database(url)
        try:
            applied = migrate(database)
        finally:
            database.close()
        store = cls(url)
        store.is_new = len(applied) == len(known_migrations())
        return store

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_NAME = re.compile(r"[A-Za-z0-9._/-]{1,190}", re.ASCII)
_OFF = "off"


@dataclass(frozen=True, slots=True, order=True)
class OffCard:
    """A card on which nobody is put beside anybody until it is on again (``gpushare off``)."""

    node: str
    gpu: int
    why: str
    """In the administrator's words, for `gpushare status`; may be empty."""
    since_s: int


class KnowledgeDocuments(Subject):
    """``store.knowledge``: JSON documents by name: knowledge bases (``kb/V100``), models, learners' positions."""

    def put(self, documents: Mapping[str, Mapping[str, Any]], assignments: Collection[Assignment] = ()) -> None:
        """Write documents, and the clusters that profiles get by them, all or none; others of the same names go."""
        assert all(_NAME.fullmatch(name) for name in documents), "names are ours, not a user's"
        if not documents:
            return
        now_s = int(time.time())
        dump = partial(json.dumps, separators=(",", ":"), allow_nan=False)
        rows = [{"name": name, "updated_s": now_s, "body": dump(body)} for name, body in documents.items()]
        with self._db.write() as connection:
            insert_many(connection, schema.knowledge, rows, replace=True)
            assign(connection, assignments)

    def get(self, name: str) -> Mapping[str, Any] | None:
        with self._db.read() as connection:
            body = connection.scalar(select(schema.knowledge.c.body).where(schema.knowledge.c.name == name))
        return None if body is None else _load(body)

    def drop(self, name: str) -> None:
        """Forget a document; one that is not there is no error."""
        with self._db.write() as connection:
            connection.execute(delete(schema.knowledge).where(schema.knowledge.c.name == name))

    def save_clusters(self, gpu_model: str, model: Mapping[str, Any], assignments: Collection[Assignment] = ()) -> int:
        """Save a cluster model and, in the same transaction, the clusters that it gives; returns its version."""
        version = self.clusters(gpu_model)[0] + 1
        self.put({f"clusters/{gpu_model}/{version}": model}, assignments)
        return version

    def clusters(self, gpu_model: str) -> tuple[int, Mapping[str, Any]]:
        """Version and body of a GPU model's latest cluster model; 0 and nothing if there is none."""
        k, series = schema.knowledge.c, f"clusters/{gpu_model}/"
        query = select(k.name, k.body).where(k.name.startswith(series, autoescape=True))
        with self._db.read() as connection:
            row = connection.execute(query.order_by(func.length(k.name).desc(), k.name.desc()).limit(1)).one_or_none()
        return (int(row.name.removeprefix(series)), _load(row.body)) if row else (0, {})

    def off_cards(self) -> list[OffCard]:
        """The cards that administrators keep out of sharing, by node and index."""
        return sorted(OffCard(**card) for card in (self.get(_OFF) or {}).get("cards", ()))

    def keep_off(self, cards: Iterable[OffCard]) -> None:
        """Let these be the cards that are off, in place of those that were."""
        self.put({_OFF: {"cards": [asdict(card) for card in cards]}})


def _load(body: str) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(body)
    return loaded
