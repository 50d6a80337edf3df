"""Answering a hold: a small look at the node whose job has ended, and the head of the queue gets its card.

It runs in a thread of its own, because a tick of a large site takes longer than a hold lasts. The helper's lock is held
while an answer is worked out and written; a tick takes it for each of its changes, and leaves alone what an answer has
placed since the tick asked Slurm.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_gpushare.helper import log
from slurm_gpushare.helper.apply import Outcome
from slurm_gpushare.helper.changes import read_again
from slurm_gpushare.helper.events import EndedJob, EndedJobs
from slurm_gpushare.helper.hold import Board
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import GpuAddress, leaving
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.snapshot import How, Placement
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job

BEAT_S = 2.0
"""How often the nodes are told that we live and that somebody waits."""
IDLE_BEAT_S = 30.0
"""How often while nobody waits: only 'gpushare doctor' reads it then (`site/hold_checks.py`)."""
BELIEVED_S = 10.0
"""How long they believe it."""
TRIES = 4
"""How often a plan is made anew because Slurm had started its job meanwhile."""
OLD_VIEW_S = 15.0
"""A view this old, or of three ticks ago, is no ground for a decision."""
QUICK_S = 0.25
"""Where answers take longer than this, only cards that became empty are given away here; halves wait for the tick."""
EPILOG_BEGAN_MS = 15
"""The controller tells us this much later than the epilog begins on the node."""


@dataclass(slots=True)
class _Answer:
    """One answer while it is worked out."""

    heard_s: float
    waiting: dict[str, list[int]]
    """Nodes that still hold, with the jobs that ended there."""
    emptied: list[GpuAddress] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    fresh: dict[str, Job] = field(default_factory=dict)
    """The jobs that are about to be placed, read again in one request."""


class Answerer:
    """The thread that hears of ended jobs and answers their nodes."""

    def __init__(self, helper: Helper, slurm: Slurm) -> None:
        config = helper.config
        self._helper = helper
        self._slurm = slurm
        self._hold_s = config.epilog_hold_s
        self._oldest_s = max(OLD_VIEW_S, 3 * config.tick_s)
        self._board = Board(config.spool_dir)
        self._board.open()
        self._pipe = EndedJobs(config.state_dir)
        self._stop = False
        self._took_s = 0.0
        self._published_ms = -1
        self._beat_ms = 0
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        """Tell the nodes that nobody answers any more."""
        self._stop = True
        self._pipe.interrupt()
        self._thread.join()
        self._pipe.close()
        self._board.publish(0, 0)

    def publish(self) -> None:
        """Tell the nodes whether a hold is worth its while now."""
        helper = self._helper
        with helper.lock:
            now_ms = round(1000 * time.time())
            taken_s = helper.recent.taken_s
            known = taken_s is not None and time.monotonic() - taken_s < self._oldest_s
            until_ms = now_ms + round(1000 * BELIEVED_S) if known and helper.state.somebody_waits else 0
            if until_ms or self._published_ms or now_ms - self._beat_ms >= 1000 * IDLE_BEAT_S:
                shared = [node for node in helper.recent.nodes.values() if helper.shares(node)]
                self._board.expect(node.name for node in shared)
                self._board.publish(now_ms, until_ms, [node.name for node in shared if not node.usable])
                self._published_ms, self._beat_ms = until_ms, now_ms

    def _run(self) -> None:
        beaten_s = time.monotonic()
        while not self._stop:
            try:
                ended = self._pipe.wait(max(0.0, beaten_s + BEAT_S - time.monotonic()))
                heard_s = time.monotonic()
                if ended:
                    self.answer(ended, heard_s)
                if heard_s - beaten_s >= BEAT_S:
                    beaten_s = heard_s
                    self.publish()
            except Exception as error:  # noqa: BLE001 - whatever it was, the thread must go on to answer
                # The nodes' holds end by themselves; the next job that ends is a new chance.
                log.warning("answer-failed", error=f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def answer(self, ended: Sequence[EndedJob], heard_s: float) -> None:
        """Give what these jobs leave to the head of the queue, and tell the nodes whose cards became empty."""
        answer = _Answer(heard_s, {node: [job.raw_id for job in ended if node in job.nodes] for node in _nodes(ended)})
        try:
            with self._helper.lock:
                self._give(ended, answer)
        finally:
            for node in list(answer.waiting):
                self._let_go(node, answer)
        self._took_s = time.monotonic() - heard_s
        placed = answer.outcomes["place:done"]
        if answer.emptied or placed:
            log.info(
                "answer", ended=",".join(str(job.raw_id) for job in ended), cards=",".join(map(str, answer.emptied)),
                placed=placed, ms=round(1000 * self._took_s),
            )  # fmt: skip

    def _let_go(self, node: str, answer: _Answer) -> None:
        """The node need not wait any longer."""
        self._board.answer(node, answer.waiting.pop(node))
        held_ms = round(1000 * (time.monotonic() - answer.heard_s)) + EPILOG_BEGAN_MS
        for card in answer.emptied:
            if card.node == node:
                self._helper.state.contest.held(min(held_ms, round(1000 * self._hold_s)))

    def _give(self, ended: Sequence[EndedJob], answer: _Answer) -> None:
        helper, recent = self._helper, self._helper.recent
        gone = [job for item in ended if (job := self._ended(item)) is not None]
        nodes = {node for job in gone for node in job.nodes}
        if not nodes or not helper.state.somebody_waits:
            return
        recent.refresh_nodes(self._slurm.nodes(sorted(nodes)))
        for attempt in range(TRIES):
            view = recent.view(time.time(), helper.config)
            if view is None:
                return
            if attempt == 0:
                answer.emptied = _emptied(view, gone, helper.config.lease_s)
            wanted = self._worth_a_plan(nodes, answer) & answer.waiting.keys()
            if not wanted:
                return
            decided = plan(view.snapshot, helper.knowledge, helper.settings)
            here = [item for item in decided.placements if item.place.node in wanted]
            answer.fresh = read_again(self._slurm, [item.key for item in here])
            for node in sorted(wanted):
                if not self._place([item for item in decided.placements if item.place.node == node], view, answer):
                    break
                self._let_go(node, answer)

    def _worth_a_plan(self, nodes: set[str], answer: _Answer) -> set[str]:
        """Nodes on which somebody is to be placed now: a half that was left there can wait, an empty card cannot."""
        return nodes if self._took_s < QUICK_S else {card.node for card in answer.emptied}

    def _ended(self, item: EndedJob) -> Job | None:
        """The job as we know it, marked as ended; Slurm is asked about one that started since we looked."""
        recent = self._helper.recent
        job = recent.running_job(item.raw_id)
        if job is None:
            job = next((found for found in self._slurm.jobs([str(item.raw_id)]) if found.raw_id == item.raw_id), None)
        if job is None or job.pending:
            return None
        recent.ended(job if job.nodes else _at(job, item.nodes))
        self._helper.state.contest.ended(job.key)
        return job

    def _place(self, placements: Iterable[Placement], view: View, answer: _Answer) -> bool:
        """Write the placements; False if one of the jobs has moved on, so that the plan must be made anew."""
        helper = self._helper
        for placement in placements:
            card = GpuAddress(placement.place.node, placement.place.first)
            first = placement.how in (How.ALONE, How.UNSHARED) and card in answer.emptied
            outcome = helper.place(placement, view, answer.outcomes, answer.fresh)
            if outcome is Outcome.DONE and first:
                helper.state.contest.given(placement.key, card)
            elif outcome is Outcome.MOVED_ON:
                found = next(iter(self._slurm.jobs([placement.key])), None)
                if first and found is not None and found.running and found.nodes == (card.node,):
                    helper.state.contest.lost()
                helper.recent.update(placement.key, found if found and (found.pending or found.running) else None)
                return False
        return True


def _nodes(ended: Iterable[EndedJob]) -> set[str]:
    return {node for job in ended for node in job.nodes}


def _at(job: Job, nodes: tuple[str, ...]) -> Job:
    """A job that has just ended may have no node list any more."""
    return replace(job, nodes=nodes)


def _emptied(view: View, gone: Iterable[Job], bound_s: float) -> list[GpuAddress]:
    """The cards that these jobs had and that nobody has or is sent to now."""
    keys = {job.key for job in gone}
    return [
        card
        for card, use in view.cards.items()
        if any(share.job.key in keys for share in use.occupants)
        and all(leaving(share.job, view.now_s, bound_s) for share in use.occupants)
        and not use.coming
        and not use.stranger
    ]
