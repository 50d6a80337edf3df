"""Makes the helper's changes: each job is read again first, and what an answer to a node did meanwhile comes first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from slurm_gpushare.helper import log
from slurm_gpushare.helper.apply import CHANGED, Applied, Outcome, apply
from slurm_gpushare.helper.changes import Change, is_same, read_again
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.occupancy import GpuAddress, placed_card, placed_cards
from slurm_gpushare.helper.queue_facts import QueueFacts
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node, Reservation
from slurm_gpushare.slurm.queue import Job

MANY = 300
MANY_S = 1.0
"""What thousands of jobs may want at once is done so many a tick, and no longer: pauses and memory must not wait."""
REFUSED_S = 60.0
"""What Slurm refused is not tried again for so long, or the same jobs would keep all others from their turn."""


class Changer:
    """Used by the tick and by the thread that answers nodes."""

    def __init__(self, slurm: Slurm, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.recent = RecentView()
        self.lock = threading.RLock()
        """Held while changes are made, and while an answer to a node is worked out in its own thread."""
        self.asked_s = 0.0
        """When the tick asked Slurm for the queue (monotonic clock)."""
        self._slurm = slurm
        self._fresh: dict[str, Job] = {}
        self._refused_s: dict[tuple[str, str], float] = {}
        """When Slurm refused a tick which change of which job (monotonic clock). Only ticks read and write it."""

    def read_again(self, keys: Iterable[str]) -> None:
        """Read jobs that are about to be changed in one request instead of one by one."""
        if not self.dry_run:
            self._fresh = read_again(self._slurm, keys)

    def not_refused(self, changes: Iterable[tuple[Job, Change]], event: str) -> Iterator[tuple[Job, Change]]:
        """Those that Slurm has not just refused under the name of `event`."""
        since_s = time.monotonic() - REFUSED_S
        self._refused_s = {key: at_s for key, at_s in self._refused_s.items() if at_s > since_s}
        return ((job, change) for job, change in changes if (event, job.key) not in self._refused_s)

    def in_time(self, changes: Iterable[tuple[Job, Change]], event: str) -> Iterator[tuple[Job, Change]]:
        """The first of many changes, as many as a tick has time for; their jobs are read again in one request."""
        some = list(islice(self.not_refused(changes, event), MANY))
        self.read_again(job.key for job, _ in some)
        until_s = time.monotonic() + MANY_S
        for job, change in some:
            if time.monotonic() > until_s:
                self._fresh.clear()  # would be old by the next change
                return
            yield job, change

    def apply(
        self,
        job: Job,
        change: Change,
        event: str,
        outcomes: Counter[str],
        answer: dict[str, Job] | None = None,
        **fields: object,
    ) -> Applied:
        """Change a job if it is still what the decision was about; counted in `outcomes`, and logged with `fields`.

        `answer`: in answer to a node, with the jobs that were read again for it.
        """
        with self.lock:
            if answer is None and job.key in self.recent.overtaken(self.asked_s)[0]:
                applied = Applied(job.key, Outcome.MOVED_ON, "it was placed in answer to a node meanwhile")
            elif not self._is_same(job, self._fresh if answer is None else answer):
                applied = Applied(job.key, Outcome.MOVED_ON, CHANGED)
            else:
                applied = apply(self._slurm, change, self.dry_run)
                if applied.outcome is Outcome.DONE:
                    self.recent.update(job.key, as_changed(job, change), answered=answer is not None)
        if applied.outcome is Outcome.REFUSED and answer is None:
            self._refused_s[event, job.key] = time.monotonic()
        outcomes[f"{event}:{applied.outcome}"] += 1
        tell = log.warning if applied.outcome is Outcome.REFUSED else log.info
        tell(event, job=job.key, outcome=applied.outcome, **fields, message=applied.message or None)
        return applied

    def _is_same(self, job: Job, fresh: dict[str, Job]) -> bool:
        """Whether the job is still what the decision was about, by what was read again just now."""
        if self.dry_run:
            return True
        now = fresh.pop(job.key, None) or read_again(self._slurm, [job.key]).get(job.key)
        return is_same(job, now)


# The last tick's view of the cluster, kept up to date with what was heard and done since.
#
# It spares an answer the whole queue: nothing of Slurm is asked again but the node in question. Only the head of the
# queue is kept, since nobody further back gets an empty card.


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
        self._seen: TickFacts | None = None
        self._mean_s: Mapping[int, float] = {}
        self._nodes: dict[str, Node] = {}
        self._jobs: dict[str, Job] = {}
        self._keys: dict[int, str] = {}
        """Of jobs that run or were sent somewhere, by SLURM_JOB_ID."""
        self._updates: dict[str, _Update] = {}
        self.taken_s: float | None = None
        """When the last tick had looked (monotonic clock)."""

    def take(self, view: View, seen: TickFacts, asked_s: float) -> None:
        """Take over what a tick has just seen. What was heard or done since it asked Slurm still holds."""
        heads = {job.key for job in view.snapshot.pending[:HEADS]}
        self._seen = seen
        self._mean_s = view.snapshot.mean_duration_s
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

    def view(self, now_s: float, config: Config) -> View | None:
        """The cluster now; None before the first tick."""
        if (seen := self._seen) is None:
            return None
        found = observe(
            list(self._jobs.values()), list(self._nodes.values()), seen.reservations, config, seen.facts, now_s,
            seen.tiers,
        )  # fmt: skip
        return replace(found, snapshot=replace(found.snapshot, mean_duration_s=self._mean_s))
