"""Write changes into Slurm. A job that moved on meanwhile is news; only Slurm's own trouble is an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slurm_gpushare.helper.changes import Change, is_same, read_again, restore
from slurm_gpushare.helper.occupancy import may_start, placed_card
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.runner import ControllerDown, JobMovedOn, SlurmMissing


class Outcome(StrEnum):
    """What became of a change."""

    DONE = "done"
    DRY = "dry-run"
    MOVED_ON = "moved-on"  # it started, ended or was changed first
    REFUSED = "refused"


CHANGED = "it changed while this was decided"


@dataclass(frozen=True, slots=True)
class Applied:
    """A change and what became of it."""

    key: str
    outcome: Outcome
    message: str = ""


def apply(slurm: Slurm, change: Change, dry_run: bool = False) -> Applied:
    """Make one change. Raises only if Slurm as a whole does not answer: the tick is then over."""
    if dry_run:
        return Applied(change.key, Outcome.DRY)
    try:
        slurm.update_job(change.key, change.fields)
    except JobMovedOn as news:
        return Applied(change.key, Outcome.MOVED_ON, news.what)
    except (ControllerDown, SlurmMissing):
        raise
    except SlurmError as error:
        return Applied(change.key, Outcome.REFUSED, error.what)
    return Applied(change.key, Outcome.DONE)


def release_jobs(
    slurm: Slurm, jobs: Iterable[Job], now_s: float, dry_run: bool = False
) -> list[tuple[Change, Applied]]:
    """Give every pending job that carries something of ours its original request back."""
    found = ((job, restore(job, slurm.release, now_s)) for job in jobs)
    changes = [(job, change) for job, change in found if change is not None]
    again = {} if dry_run else read_again(slurm, [job.key for job, _ in changes])
    done = []
    for job, change in changes:
        if dry_run or is_same(job, again.get(job.key)):
            done.append((change, apply(slurm, change, dry_run)))
        else:
            done.append((change, Applied(change.key, Outcome.MOVED_ON, CHANGED)))
    return done


# Placements that came to nothing: found, taken back, and not tried again on the same node.


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
