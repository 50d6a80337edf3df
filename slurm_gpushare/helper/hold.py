"""What the helper tells the nodes, in files of the spool's file system that only SlurmUser can write.

``SpoolDir/hold/helper`` has one line: the helper's beat (when it was written, in milliseconds of unix time; it grows
while the helper lives, and is 0 once it has stopped), the time until which a hold is wanted (0: nobody waits), and the
nodes that are not to hold, separated by commas.
``SpoolDir/hold/answers/NODE`` has the ids of the jobs on that node whose end the helper has looked at lately.
``prolog/epilog.sh`` reads both.

Files are overwritten in place, never replaced: a client of NFS asks the server again when it opens a file that it
knows, while a new name may stay hidden from it for half a minute.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from slurm_gpushare.helper.occupancy import CardUse, GpuAddress, placed_card
from slurm_gpushare.node.delivery import hold_dir
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import make_open_dir, overwrite_line
from slurm_gpushare.slurm.queue import Job

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
        except OSError as why:
            raise GpushareError(
                f"{why.filename}: {why.strerror}", "SpoolDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why

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
        self.expect([node])
        if (answered := self._answered.get(node)) is not None:
            answered.extend(jobs)
            overwrite_line(self._answers / node, " ".join(map(str, answered)))


# Who got the cards that became empty while the next job in the queue was one of ours: we, or Slurm by itself.


class Contest:
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
