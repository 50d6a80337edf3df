"""The store as the rest of the package sees it: one object, one attribute for each subject."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sqlalchemy import delete, select

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.schema import known_migrations, migrate, require_current
from slurm_gpushare.store.sharing import Conduct, Observations, SharingSpans
from slurm_gpushare.store.spool import Inbox
from slurm_gpushare.store.statements import Counters, chunks
from slurm_gpushare.store.stored_jobs import Decisions, InterimRecords, Runs
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
        self.models = Models(self.database)
        self.knowledge = KnowledgeDocuments(self.database)
        self.observations = Observations(self.database)
        self.sharing = SharingSpans(self.database)
        self.decisions = Decisions(self.database)
        self.conduct = Conduct(self.database)
        self.counters = Counters(self.database)
        self.inbox = Inbox(self.database)

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


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A cluster model as it was saved."""

    version: int
    body: Mapping[str, Any]


class Models:
    """``store.models``: cluster models; the latest of a GPU model is in force."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def save(self, gpu_model: str, body: Mapping[str, Any], assignments: Collection[Assignment] = ()) -> int:
        """Save a model and, in the same transaction, the clusters that it gives; returns its version."""
        m = schema.model
        row = {"gpu_model": gpu_model, "created_s": int(time.time()), "body": _dump(body)}
        with self._db.write() as connection:
            key = connection.execute(m.insert().values(row)).inserted_primary_key
            assert key is not None
            version = int(key[0])
            assign(connection, assignments)
        return version

    def latest(self, gpu_model: str) -> StoredModel | None:
        m = schema.model
        query = select(m).where(m.c.gpu_model == gpu_model).order_by(m.c.version.desc()).limit(1)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return StoredModel(row.version, json.loads(row.body)) if row else None


class KnowledgeDocuments:
    """``store.knowledge``: the knowledge bases in force (``kb/V100``) and how far the learner came."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Write documents, all or none; an existing one of the same name is replaced."""
        assert all(_NAME.fullmatch(name) for name in documents), "names are ours, not a user's"
        k, now_s = schema.knowledge, int(time.time())
        if not documents:
            return
        with self._db.write() as connection:
            names = sorted(documents)
            for some in chunks(names):
                connection.execute(delete(k).where(k.c.name.in_(some)))
            rows = [{"name": name, "updated_s": now_s, "body": _dump(body)} for name, body in documents.items()]
            connection.execute(k.insert(), rows)

    def get(self, name: str) -> Mapping[str, Any] | None:
        with self._db.read() as connection:
            body = connection.scalar(select(schema.knowledge.c.body).where(schema.knowledge.c.name == name))
        return None if body is None else _load(body)

    def drop(self, name: str) -> None:
        """Forget a document; one that is not there is no error."""
        with self._db.write() as connection:
            connection.execute(delete(schema.knowledge).where(schema.knowledge.c.name == name))


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _load(body: str) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(body)
    return loaded
