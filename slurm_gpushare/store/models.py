"""Models and knowledge: versioned or named JSON documents of numbers. What is in them is knowledge's affair."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select

from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.statements import chunks
from slurm_gpushare.store.workloads import Assignment, assign

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
