"""Cards that have just become empty: a node's epilog holds one for a moment, the head of the queue gets it, and the
node is told that it need not wait any longer.

What the helper tells nodes is in files of the spool's file system that only SlurmUser can write.

``SpoolDir/hold/helper`` has one line: the helper's beat (when it was written, in milliseconds of unix time; it grows
while the helper lives, and is 0 once it has stopped), the time until which a hold is wanted (0: nobody waits), and the
nodes that are not to hold, separated by commas.
``SpoolDir/hold/answers/NODE`` has the ids of the jobs on that node whose end the helper has looked at lately.
``prolog/epilog.sh`` reads both.

Files are overwritten in place, never replaced: a client of NFS asks the server again when it opens a file that it
knows, while a new name may stay hidden from it for half a minute.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_gpushare.helper import log
from slurm_gpushare.helper.changes import Outcome, read_again
from slurm_gpushare.helper.loop import Work
from slurm_gpushare.helper.observe import View, observe
from slurm_gpushare.helper.occupancy import GpuAddress, leaving
from slurm_gpushare.helper.plan import plan
from slurm_gpushare.helper.queue_facts import QueueFacts
from slurm_gpushare.helper.snapshot import How, Placement, Plan
from slurm_gpushare.helper.tick import Helper
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel
from slurm_gpushare.node.delivery import hold_dir
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import make_open_dir, overwrite_line
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import expand

REMEMBERED = 16
"""Answers that a node's file holds: as many jobs may end on a node at once."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Board:
    """The notice board of one helper."""

    def __init__(self, spool_dir: Path) -> None:
        self.directory = hold_dir(spool_dir)
        self._answers = self.directory / "answers"
        self._answered: dict[str, deque[int]] = {}

    def open(self) -> None:
        """Make the directories, so that nobody else can write in them."""
        try:
            for path in (self.directory, self._answers):
                make_open_dir(path)
            known = next(iter(self._answered), None)
            if known is not None and not (self._answers / known).exists():  # all were removed, or of another mount
                self._answered.clear()
        except OSError as why:
            raise GpushareError(
                f"{why.filename}: {why.strerror}", "SpoolDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why

    def show(self, beat: int, until_ms: int, nodes: Collection[str], without: Collection[str]) -> None:
        """`publish`, with an answer file for each of the nodes; makes the directories anew where they are gone."""
        self.open()
        self.expect(nodes)
        self.publish(beat, until_ms, without)

    def publish(self, beat: int, until_ms: int, without: Collection[str] = ()) -> None:
        """Say that somebody waits who could use a card, until `until_ms`; 0 says that nobody does."""
        overwrite_line(self.directory / "helper", f"{beat} {until_ms} {','.join(sorted(without)) or '-'}")

    def expect(self, nodes: Iterable[str]) -> None:
        """Make the answer files of nodes that have none yet."""
        for node in nodes:
            if node not in self._answered and _NODE.fullmatch(node):
                self._answered[node] = deque(maxlen=REMEMBERED)
                overwrite_line(self._answers / node, "-")

    def answer(self, node: str, jobs: Iterable[int]) -> None:
        """Tell `node` that the helper has looked at the end of these jobs."""
        self.open()
        self.expect([node])
        if (answered := self._answered.get(node)) is not None:
            answered.extend(jobs)
            overwrite_line(self._answers / node, " ".join(map(str, answered)))


def show_jobs(spool_dir: Path, hidden: bool) -> None:
    """Let everybody read the job ids in answers and stop orders; only SlurmUser and root where Slurm hides jobs."""
    board = hold_dir(spool_dir)
    try:
        for path in (board, board / "answers", board / "stops") if spool_dir.is_dir() else ():
            make_open_dir(path)
            path.chmod(0o700 if hidden and path != board else 0o755)
    except OSError as why:
        log.warning("hold", error=f"{why.filename}: {why.strerror}")


# Hearing at once that a job has ended: a named pipe into which EpilogSlurmctld writes (prolog/epilog_slurmctld.sh).


_LINE = re.compile(r"([0-9]{1,10}) (\S{1,1000})", re.ASCII)
_MOST_BYTES = 65536


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, and where its epilog runs."""

    raw_id: int
    nodes: tuple[str, ...]


def parse_ended(text: str) -> list[EndedJob]:
    """One job a line, its id and its node list; anything else is skipped."""
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [EndedJob(int(line[1]), tuple(expand(line[2]))) for line in found if line]


class EndedJobs:
    """The reading end of ``StateDir/ended``. Only SlurmUser, who runs slurmctld and the helper, may open it."""

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / "ended"
        try:
            if path.exists() and not stat.S_ISFIFO(path.lstat().st_mode):
                path.unlink()
            if not path.exists():
                os.mkfifo(path, 0o600)
            # For writing too: then reading never says that everybody has closed it.
            self.handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as why:
            raise GpushareError(
                f"{path}: {why.strerror}", "StateDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why
        self._rest = b""

    def read(self) -> list[EndedJob]:
        """The jobs that ended since the last call; there is something to read when `handle` is readable."""
        try:
            new = os.read(self.handle, _MOST_BYTES)
        except BlockingIOError:
            return []
        whole, newline, self._rest = (self._rest + new).rpartition(b"\n")
        if len(self._rest) > _MOST_BYTES:
            self._rest = b""
        return parse_ended(whole.decode("ascii", "replace")) if newline else []

    def close(self) -> None:
        os.close(self.handle)


# Answering: a small look at the node whose job has ended. A tick that runs meanwhile leaves its cards alone.


BEAT_S = 2.0
"""How often the nodes are told that we live and that somebody waits."""
IDLE_BEAT_S = 30.0
"""How often while nobody waits: only 'gpushare doctor' reads it then (`site/script_checks.py`)."""
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
MOST_AT_ONCE = 8
"""Ended jobs that one answer looks at: the first must not wait for the last."""


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


def decide(
    jobs: Collection[Job], nodes: Collection[Node], facts: QueueFacts, config: Config,
    knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings,
) -> tuple[View, Plan]:  # fmt: skip
    """What should happen now, as far as is known."""
    view = observe(jobs, nodes, config, facts, time.time())
    return view, plan(view.snapshot, knowledge, settings)


class Answerer:
    """Hears of ended jobs and answers their nodes."""

    def __init__(self, helper: Helper, slurm: Slurm, config: Config) -> None:
        self._helper = helper
        self._slurm = slurm
        self.places = config.spool_dir, config.state_dir
        self._board = Board(config.spool_dir)
        self.pipe = EndedJobs(config.state_dir)
        self._ended: deque[tuple[float, EndedJob]] = deque()
        self._took_s = 0.0
        self._published_ms = -1
        self._beat_ms = 0

    def hear(self) -> None:
        """Jobs have ended; `answer_all` looks at them."""
        heard_s = time.monotonic()
        self._ended.extend((heard_s, item) for item in self.pipe.read())

    def say_goodbye(self) -> None:
        """Tell the nodes that nobody answers any more."""
        self._board.publish(0, 0)

    async def publish(self) -> None:
        """Tell the nodes whether a hold is worth its while now."""
        helper, recent = self._helper, self._helper.recent
        now_ms = round(1000 * time.time())
        oldest_s = max(OLD_VIEW_S, 3 * helper.config.tick_s)
        known = recent.taken_s is not None and time.monotonic() - recent.taken_s < oldest_s
        until_ms = now_ms + round(1000 * BELIEVED_S) if known and helper.state.somebody_waits else 0
        if until_ms or self._published_ms or now_ms - self._beat_ms >= 1000 * IDLE_BEAT_S:
            shared = [node for node in recent.nodes.values() if helper.shares(node)]
            without = [node.name for node in shared if not node.usable]
            await Work(self._board.show, now_ms, until_ms, [node.name for node in shared], without)
            self._published_ms, self._beat_ms = until_ms, now_ms

    async def answer_all(self) -> None:
        """Answer the nodes of all jobs that were heard of."""
        while self._ended:
            some = [self._ended.popleft() for _ in range(min(MOST_AT_ONCE, len(self._ended)))]
            await self.answer([item for _, item in some], some[0][0])

    async def answer(self, ended: Sequence[EndedJob], heard_s: float) -> None:
        """Give what these jobs leave to the head of the queue, and tell the nodes whose cards became empty."""
        answer = _Answer(heard_s, {node: [job.raw_id for job in ended if node in job.nodes] for node in _nodes(ended)})
        answering = self._helper.state.answering
        answering |= answer.waiting.keys()
        try:
            await self._give(ended, answer)
        finally:
            answering -= {node for item in ended for node in item.nodes}
            for node in list(answer.waiting):
                await self._let_go(node, answer)
            self._took_s = time.monotonic() - heard_s
        placed = answer.outcomes["place:done"]
        if answer.emptied or placed:
            log.noted(
                "answer", ended=",".join(str(job.raw_id) for job in ended), cards=",".join(map(str, answer.emptied)),
                placed=placed, ms=round(1000 * self._took_s),
            )  # fmt: skip

    async def _let_go(self, node: str, answer: _Answer) -> None:
        """The node need not wait any longer."""
        await Work(self._board.answer, node, answer.waiting.pop(node))
        held_ms = round(1000 * (time.monotonic() - answer.heard_s)) + EPILOG_BEGAN_MS
        for card in answer.emptied:
            if card.node == node:
                self._helper.state.handovers.held(min(held_ms, round(1000 * self._helper.config.epilog_hold_s)))

    async def _give(self, ended: Sequence[EndedJob], answer: _Answer) -> None:
        helper, recent = self._helper, self._helper.recent
        gone = [job for item in ended if (job := await self._take_note(item)) is not None]
        nodes = {node for job in gone for node in job.nodes}
        if not nodes or not helper.state.somebody_waits:
            return
        if any(first := recent.rules.preemptors):  # one that came since the last tick may be why these jobs ended
            for job in await Work(self._slurm.jobs_in, *first):
                recent.update(job.key, job)
        recent.refresh_nodes(await Work(self._slurm.nodes, sorted(nodes)))
        for attempt in range(TRIES):
            if recent.facts is None:
                return
            view, decided = await Work(
                decide, recent.jobs, list(recent.nodes.values()), recent.facts, helper.config, helper.knowledge,
                helper.settings,
            )  # fmt: skip
            if attempt == 0:
                answer.emptied = _emptied(view, gone, helper.config.lease_s)
            wanted = self._worth_a_plan(nodes, answer) & answer.waiting.keys()
            if not wanted:
                return
            placements = [item for item in decided.placements if item.place.node in wanted]
            answer.fresh = await Work(read_again, self._slurm, [item.key for item in placements])
            for node in sorted(wanted):
                if not await self._place([item for item in placements if item.place.node == node], view, answer):
                    break  # planned anew, with what is known now
                await self._let_go(node, answer)
            else:
                return

    def _worth_a_plan(self, nodes: set[str], answer: _Answer) -> set[str]:
        """Nodes on which somebody is to be placed now: a half that was left there can wait, an empty card cannot."""
        return nodes if self._took_s < QUICK_S else {card.node for card in answer.emptied}

    async def _take_note(self, item: EndedJob) -> Job | None:
        """The job as we know it, marked as ended; Slurm is asked about one that started since we looked."""
        recent = self._helper.recent
        job = recent.running_job(item.raw_id)
        if job is None:
            asked = await Work(self._slurm.jobs, [str(item.raw_id)])
            job = next((found for found in asked if found.raw_id == item.raw_id), None)
        if job is None or job.pending:
            return None
        recent.ended(job if job.nodes else _at(job, item.nodes))
        self._helper.state.handovers.ended(job.key)
        return job

    async def _place(self, placements: Iterable[Placement], view: View, answer: _Answer) -> bool:
        """Write the placements; False if one of the jobs has moved on, so that the plan must be made anew."""
        helper = self._helper
        for placement in placements:
            card = GpuAddress(placement.place.node, placement.place.first)
            first = placement.how in (How.ALONE, How.UNSHARED) and card in answer.emptied
            outcome = await helper.place(placement, view, answer.outcomes, answer.fresh)
            if outcome is Outcome.DONE and first:
                helper.state.handovers.given(placement.key, card)
            elif outcome is Outcome.MOVED_ON:
                found = next(iter(await Work(self._slurm.jobs, [placement.key])), None)
                if first and found is not None and found.running and found.nodes == (card.node,):
                    helper.state.handovers.lost()
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
