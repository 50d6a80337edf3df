"""Everything that the helper remembers between two events, in one place with one owner.

It is made once and outlives every reload: settings are not part of it but an argument of each call. What matters of it
is rebuilt from Slurm and the store when a helper starts. Nothing here may be touched from another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slurm_gpushare.helper.act import Changer, Comments
from slurm_gpushare.helper.durations import RecentDurations
from slurm_gpushare.helper.loop import Faults
from slurm_gpushare.helper.observe import LostShards
from slurm_gpushare.helper.pairs import Ledger, SpanKeeper
from slurm_gpushare.helper.placements import CardHandovers, Placements, RecentView
from slurm_gpushare.helper.preemption import Preemptors
from slurm_gpushare.helper.profile_check import ProfileWatch
from slurm_gpushare.helper.queue_facts import SiteCache, StoreReader
from slurm_gpushare.helper.shadow_policy import ShadowRecord
from slurm_gpushare.helper.watch import Watch
from slurm_gpushare.helper.why_left import WaitReasons
from slurm_gpushare.protocol.history import Decision, StoredJob
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store


@dataclass(slots=True)
class Requeue:
    """A job that is to be put back into the queue because of what it costs the job `beside` it."""

    job: Job
    beside: Job
    why: str
    tries: int = 0
    due_s: float = 0.0
    """When it is tried the next time."""


class State:
    """The helper's memory."""

    def __init__(
        self, slurm: Slurm, store: Store, *, dry_run: bool = False, stopwatch: Callable[[], float] | None = None
    ) -> None:
        """`stopwatch` counts seconds and never jumps, as a clock may; None where a test makes its own time."""
        self.store_facts = StoreReader(store)
        self.site = SiteCache(slurm)
        self.durations = RecentDurations()
        self.lost_shards = LostShards()
        # Pairs that share: since when, what it has cost, what is done about it.
        self.pairs = Ledger(stopwatch)
        self.spans = SpanKeeper(store, slurm)
        self.watch = Watch(store, slurm, self.pairs)
        self.profile_watch = ProfileWatch(store)
        # Jobs on their way to a card.
        self.recent = RecentView()
        self.changer = Changer(slurm, self.recent, dry_run=dry_run)
        self.placements = Placements()
        self.handovers = CardHandovers()
        self.answering: set[str] = set()
        """Nodes that are being answered: a tick leaves their cards alone."""
        self.somebody_waits = False
        """Whether a job waits that could be given a card."""
        # Who was told what.
        self.reasons = WaitReasons()
        self.shadow = ShadowRecord(store)
        self.told: dict[str, str] = {}
        """The reason that each waiting job was last told, by key."""
        self.requeues: dict[int, Requeue] = {}
        """Jobs that are to be put back into the queue, by SLURM_JOB_ID."""
        self.preemptors = Preemptors()
        self.decisions: list[Decision] = []
        """Those that the store does not have yet."""
        self.comments = Comments(slurm, store, self.changer, self.decisions)
        self.faults = Faults()
        self.known: Mapping[str, StoredJob] | None = None
        """The jobs with tags that are in the queue, as the store has them, by key; None before the first look."""
        self.recalled = False
        """Whether what an earlier helper knew has been read from the store."""
