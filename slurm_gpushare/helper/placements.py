"""Jobs on their way to a card: where they were sent, what became of it, and the queue as it is since the last tick."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from slurm_gpushare.helper.changes import Change
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import CardUse, GpuAddress, may_start, placed_card, placed_cards
from slurm_gpushare.helper.preemption import PreemptionRules
from slurm_gpushare.helper.queue_facts import QueueFacts
from slurm_gpushare.protocol.tag import parse_tag
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job

# A node that did not start a job is left out for it this long; after two such nodes Slurm decides alone.
AVOID_S = 600.0
TRIES = 2
_AWAY = ("unavailablenodes", "nodes required for job are down")


@dataclass(frozen=True, slots=True)
class Sent:
    """When we saw a job placed for the first time, and how often it had been restarted."""

    at_s: float
    restarts: int


def _is_away(reason: str) -> bool:
    """Whether Slurm says that the job's node is not there. It says so of every node in its first seconds."""
    return any(words in reason.lower() for words in _AWAY)


class Placements:
    """What became of the jobs that we placed: memory of the helper, rebuilt from the tags after a restart."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}
        self._failed: dict[str, dict[str, float]] = defaultdict(dict)

    def sent(self, job: Job, now_s: float) -> None:
        self._sent[job.key] = Sent(now_s, job.restarts)

    def overdue(
        self, jobs: Iterable[Job], nodes: Mapping[str, Node], now_s: float, bound_s: float
    ) -> list[tuple[Job, str]]:
        """The placed jobs that must be taken back, each with the reason. Forgets jobs that are gone.

        Slurm has `bound_s` (LeaseSeconds) to start a job where it was sent.
        """
        back: list[tuple[Job, str]] = []
        present: set[str] = set()
        for job in jobs:
            present.add(job.key)
            if not (job.pending and job.tag and job.tag.placed) or job.opted_out:
                self._sent.pop(job.key, None)
                continue
            # A requeued job keeps the place that it had; one that we placed again since is in `_sent`.
            requeued = job.restarts > 0 and job.key not in self._sent
            sent = self._sent.setdefault(job.key, Sent(now_s, job.restarts))
            why = "it was requeued" if requeued else self._why(job, sent, nodes, now_s, bound_s)
            if why:
                back.append((job, why))
        for key in [key for key in self._sent if key not in present]:
            del self._sent[key]
        for key in [key for key in self._failed if key not in present]:
            del self._failed[key]
        return back

    def _why(self, job: Job, sent: Sent, nodes: Mapping[str, Node], now_s: float, bound_s: float) -> str:
        card = placed_card(job)
        if card is None:
            return "its request was changed"
        node = nodes.get(card.node)
        if node is None or not node.usable:
            return f"node {card.node} went out of service"
        if job.restarts > sent.restarts:
            return "it was requeued"
        if job.held:
            return "it was held"
        if job.dependency or not (may_start(job.reason) or _is_away(job.reason)):
            return f"Slurm holds it back ({job.reason or 'dependency'})"
        if now_s - sent.at_s > bound_s:
            return f"Slurm did not start it within {bound_s:g} s"
        return ""

    def failed(self, job: Job, nodes: Mapping[str, Node], now_s: float) -> None:
        """Remember that placing the job on its node came to nothing; one that is out of service may do when it is back.

        `nodes` are those that Slurm has now.
        """
        self._sent.pop(job.key, None)
        card = placed_card(job)
        node = nodes.get(card.node) if card else None
        if node is not None and node.usable:
            self._failed[job.key][node.name] = now_s

    def avoid(self, all_nodes: Iterable[str], now_s: float) -> dict[str, frozenset[str]]:
        """Nodes to leave out, by job."""
        found = {}
        everywhere = frozenset(all_nodes)
        for key, places in self._failed.items():
            recent = {node for node, at_s in places.items() if now_s - at_s < AVOID_S}
            if len(recent) >= TRIES:
                found[key] = everywhere
            elif recent:
                found[key] = frozenset(recent)
        return found


# Who got the cards that became empty while the next job in the queue was one of ours: we, or Slurm by itself.


class CardHandovers:
    """Counts cards won and lost. A card that we gave to a job is open until that job, or another, has started there."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[GpuAddress, float]] = {}
        self._counts: Counter[str] = Counter()

    def given(self, key: str, card: GpuAddress) -> None:
        """An empty card goes to the job `key`; whether it gets it is seen later."""
        self._open[key] = card, time.monotonic()

    def lost(self) -> None:
        """Slurm started a job of ours by itself on a card that we were about to give it."""
        self._counts["cards_lost"] += 1

    def held(self, milliseconds: int) -> None:
        """A card was kept for so long until we answered."""
        self._counts["holds"] += 1
        self._counts["hold_ms"] += milliseconds

    def ended(self, key: str) -> None:
        """The job ended, so it had started: on the one card that its request named."""
        if self._open.pop(key, None) is not None:
            self._counts["cards_won"] += 1

    def settle(self, jobs: Mapping[str, Job], cards: Mapping[GpuAddress, CardUse], asked_s: float) -> None:
        """Look who is on the cards. Slurm was asked at `asked_s` (monotonic clock): what we did since is not in it."""
        for key, (card, given_s) in list(self._open.items()):
            if given_s >= asked_s:
                continue
            job = jobs.get(key)
            if job is not None and job.running:
                self.ended(key)
            elif job is None:
                del self._open[key]  # cancelled before it started; or it ended, which `ended` was told
            elif placed_card(job) != card or _taken(cards.get(card)):
                del self._open[key]
                self.lost()

    def drain(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self._counts = dict(self._counts), Counter()
        return counts


def _taken(use: CardUse | None) -> bool:
    """Whether somebody whom we did not send is on the card."""
    return use is not None and any(
        share.job.state != "COMPLETING" and not (share.job.tag and share.job.tag.placed) for share in use.occupants
    )


# The last tick's view of the cluster, kept up to date with what was heard and done since.
#
# It spares an answer the whole queue: nothing of Slurm is asked again but the node in question. Only the head of the
# queue is kept, since nobody further back gets an empty card.


HEADS = 512
"""Waiting jobs that are kept. The plan for them is the same whoever waits behind them."""


@dataclass(frozen=True, slots=True)
class Update:
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
        self.facts: QueueFacts | None = None
        """What the last tick read besides jobs and nodes; None before the first."""
        self._nodes: dict[str, Node] = {}
        self._jobs: dict[str, Job] = {}
        self._keys: dict[int, str] = {}
        """Of jobs that run or were sent somewhere, by SLURM_JOB_ID."""
        self._updates: dict[str, Update] = {}
        self.taken_s: float | None = None
        """When the last tick had looked (monotonic clock)."""

    def take(self, view: View, facts: QueueFacts, asked_s: float) -> None:
        """Take over what a tick has just seen. What was heard or done since it asked Slurm still holds."""
        heads = {job.key for job in view.snapshot.pending[:HEADS]}
        self.facts = replace(facts, mean_duration_s=view.snapshot.mean_duration_s)
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

    def update(self, key: str, job: Job | None, *, answered: bool = False) -> Update:
        """From now on the job is like this; None: it is gone. `answered`: because an answer has placed it."""
        update = self._updates[key] = Update(time.monotonic(), job, answered)
        self._set(key, job)
        return update

    def undo(self, update: Update, job: Job) -> None:
        """The update did not come about: the job is as it was, unless something else was heard of it since."""
        if self._updates.get(job.key) is update:
            self.update(job.key, job)

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

    @property
    def rules(self) -> PreemptionRules:
        """Who may preempt whom, as the last tick knew it."""
        return self.facts.preemption if self.facts else PreemptionRules()

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())
