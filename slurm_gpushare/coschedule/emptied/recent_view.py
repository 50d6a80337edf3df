"""The last tick's view of the cluster, kept up to date with what was heard and done since.

It spares an answer the whole queue: nothing of Slurm is asked again but the node in question. Only the head of the
queue is kept, since nobody further back gets an empty card.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule.acting.changes import Change
from slurm_gpushare.coschedule.view.observe import View, observe
from slurm_gpushare.coschedule.view.occupancy import GpuAddress, placed_card, placed_cards
from slurm_gpushare.coschedule.view.queue_facts import QueueFacts
from slurm_gpushare.slurm.configuration import Reservation
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tag import parse_tag

HEADS = 512
"""Waiting jobs that are kept. The plan for them is the same whoever waits behind them."""


@dataclass(frozen=True, slots=True)
class TickFacts:
    """What a tick read, besides jobs and nodes, that a view is made of."""

    reservations: list[Reservation]
    facts: QueueFacts
    tiers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Update:
    """A job as it is since `at_s` (monotonic clock); None: it is gone."""

    at_s: float
    job: Job | None
    answered: bool = False


def as_changed(job: Job, change: Change) -> Job:
    """The job as it is once Slurm has taken the change."""
    fields = change.fields
    admin_comment = fields.get("AdminComment", job.admin_comment)
    gres = fields.get("Gres", "").split(",")[-1]
    return replace(
        job,
        per_node=f"gres/{gres}" if gres else job.per_node,
        per_task=fields.get("TresPerTask", job.per_task),
        wanted_nodes=fields.get("ReqNodeList", job.wanted_nodes),
        nice=int(fields.get("Nice", job.nice)),
        eligible_s=int(time.time()) if "StartTime" in fields else job.eligible_s,
        admin_comment=admin_comment,
        tag=parse_tag(admin_comment),
    )


class RecentView:
    """Jobs and nodes as far as is known at this moment."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._seen = TickFacts([], QueueFacts(), {})
        self._mean_s: tuple[float | None, float | None] = (None, None)
        self._nodes: dict[str, Node] = {}
        self._jobs: dict[str, Job] = {}
        self._keys: dict[int, str] = {}
        """Of jobs that run or were sent somewhere, by SLURM_JOB_ID."""
        self._updates: dict[str, _Update] = {}
        self.taken_s: float | None = None
        """When the last tick had looked (monotonic clock)."""

    def take(self, view: View, seen: TickFacts, config: Config, asked_s: float) -> None:
        """Take over what a tick has just seen. What was heard or done since it asked Slurm still holds."""
        heads = {job.key for job in view.snapshot.pending[:HEADS]}
        self._config, self._seen = config, seen
        self._mean_s = view.snapshot.mean_duration_s, view.snapshot.mean_gang_s
        self._nodes = dict(view.nodes)
        self._jobs = {
            key: job
            for key, job in view.jobs.items()
            if job.running or key in heads or (job.pending and job.tag is not None and job.tag.placed)
        }
        self._updates = {key: update for key, update in self._updates.items() if update.at_s >= asked_s}
        for key, update in self._updates.items():
            self._set(key, update.job)
        self._keys = {job.raw_id: key for key, job in self._jobs.items() if job.running or placed_card(job)}
        self.taken_s = time.monotonic()

    def _set(self, key: str, job: Job | None) -> None:
        if job is None:
            self._jobs.pop(key, None)
        else:
            self._jobs[key] = job
            self._keys[job.raw_id] = key

    def update(self, key: str, job: Job | None, *, answered: bool = False) -> None:
        """From now on the job is like this; None: it is gone. `answered`: because an answer has placed it."""
        self._updates[key] = _Update(time.monotonic(), job, answered)
        self._set(key, job)

    def overtaken(self, asked_s: float) -> tuple[set[str], set[GpuAddress]]:
        """Jobs that answers have placed since `asked_s`, and their cards: a tick that asked then leaves them alone."""
        jobs = [update.job for update in self._updates.values() if update.answered and update.at_s >= asked_s]
        cards = {card for job in jobs if job is not None for card in placed_cards(job)}
        return {job.key for job in jobs if job is not None}, cards

    def running_job(self, raw_id: int) -> Job | None:
        """The job of that SLURM_JOB_ID, if it is known to run."""
        job = self._jobs.get(self._keys.get(raw_id, ""))
        return job if job is not None and job.running else None

    def ended(self, job: Job) -> None:
        """The job has ended, and its epilog runs: it still explains what its node says is in use, but holds nothing."""
        self.update(job.key, replace(job, state="COMPLETING", end_s=int(time.time())))

    def refresh_nodes(self, nodes: Iterable[Node]) -> None:
        self._nodes.update((node.name, node) for node in nodes)

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._nodes

    def view(self, now_s: float) -> View | None:
        """The cluster now; None before the first tick."""
        if self._config is None:
            return None
        seen = self._seen
        found = observe(
            list(self._jobs.values()), list(self._nodes.values()), seen.reservations, self._config, seen.facts, now_s,
            seen.tiers,
        )  # fmt: skip
        mean_s, gang_s = self._mean_s
        return replace(found, snapshot=replace(found.snapshot, mean_duration_s=mean_s, mean_gang_s=gang_s))
