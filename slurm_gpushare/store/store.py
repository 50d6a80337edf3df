"""The store as the rest of the package sees it: one object, one attribute for each subject."""

from __future__ import annotations

from types import TracebackType

from slurm_gpushare.store.conduct import Conduct
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.migrate import known_migrations, migrate, require_current
from slurm_gpushare.store.models import KnowledgeDocuments, Models
from slurm_gpushare.store.runs import InterimRecords, Runs
from slurm_gpushare.store.sharing import Decisions, Observations, SharingSpans
from slurm_gpushare.store.spool import Inbox
from slurm_gpushare.store.statements import Counters
from slurm_gpushare.store.workloads import Profiles, Workloads


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
