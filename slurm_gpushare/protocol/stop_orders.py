"""Which jobs of a node are to stand still: the helper's order to the node's samplers.

``SpoolDir/hold/stops/NODE`` has one line, ``NUMBER JOB,JOB`` or ``NUMBER -``, with Slurm's raw job ids; where MPS is
managed a third word names jobs that Slurm is about to kill. Only SlurmUser can write it. Where nodes share no file
system with the controller (RecordsTo=store) the line is in the database, and a child of a sampler's brings it to
``StateDir/nodes/NODE/stops``.

The number grows each time the helper has seen in the queue that these jobs run. An order holds for `EXPIRY_S` after a
node saw its number grow, by the node's own stopwatch: clocks need not agree. A helper that is gone, a file system that
does not answer, an order that nobody renews: the jobs go on by themselves.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.files import make_open_dir, overwrite_line

EXPIRY_S = 30.0
ACTS_WITHIN_S = 5.0
"""A node has read an order so long after it was written."""
RENEW_S = 10.0
"""While anybody is to stand still, the queue is looked at and the order renewed at least this often."""
LONGEST_PAUSE_S = 300.0
"""The helper keeps nobody standing still for longer: watchdogs of frameworks count wall time, and give up after ten
minutes or more without progress."""

_JOBS = r"-|[0-9]{1,10}(?:,[0-9]{1,10}){0,999}"
_LINE = re.compile(rf"(?P<number>[0-9]{{1,18}}) (?P<jobs>{_JOBS})(?: (?P<dying>{_JOBS}))?\n*")
_MOST_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class StopOrder:
    """All jobs of one node that are to stand still; an empty one lets everybody go on."""

    number: int
    jobs: frozenset[int] = frozenset()
    dying: frozenset[int] = frozenset()
    """Their work on the card is to end now, before they are killed with it."""

    def __str__(self) -> str:
        words = (",".join(map(str, sorted(some))) or "-" for some in (self.jobs, self.dying))
        return f"{self.number} {' '.join(words)}" if self.dying else f"{self.number} {next(words)}"


_NOBODY = StopOrder(0)


def parse_order(text: str) -> StopOrder | None:
    """The order in a line; None if it is none."""
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    jobs, dying = (frozenset(map(int, re.findall(r"[0-9]+", found[name] or ""))) for name in ("jobs", "dying"))
    return StopOrder(int(found["number"]), jobs, dying)


def order_file(spool_dir: Path, node: str) -> Path:
    """Where the node reads its order."""
    return spool_dir / "hold" / "stops" / node


def write_order(path: Path, order: StopOrder) -> None:
    """Replace the node's order. Raises OSError."""
    for directory in (path.parent.parent, path.parent):
        make_open_dir(directory)
    overwrite_line(path, str(order))


def read_order(path: Path, slurm_user: str) -> StopOrder | None:
    """The node's order; None if there is none, or if somebody else than SlurmUser or root could have written it."""
    try:
        trusted = {0, int(slurm_user) if slurm_user.isdecimal() else pwd.getpwnam(slurm_user).pw_uid}
        directory = path.parent.lstat()
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, KeyError):
        return None
    try:
        status = os.fstat(handle)
        ours = stat.S_ISREG(status.st_mode) and stat.S_ISDIR(directory.st_mode)
        if not ours or {status.st_uid, directory.st_uid} - trusted or (status.st_mode | directory.st_mode) & 0o022:
            return None
        return parse_order(os.read(handle, _MOST_BYTES).decode("ascii", "replace"))
    except OSError:
        return None
    finally:
        os.close(handle)


class BelievedOrder:
    """A node's order as far as it can be believed, from look to look.

    The first number that is seen may be of long ago: it counts once it has grown, unless there was no order before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._number: int | None = None
        self._grew_s = float("-inf")
        self.renewals = 0
        """How often the number has grown. The queue was looked at after an event once this has grown by two."""

    def forget(self) -> None:
        """Nobody has looked for a while: the next order may be of long ago again."""
        self._number, self._grew_s = None, float("-inf")

    def believed(self, order: StopOrder | None) -> StopOrder:
        """What was just read, or an order that stops nobody."""
        if order is None:
            self._number = -1 if self._number is None else self._number
            return _NOBODY
        if self._number is not None and order.number > self._number:
            self._grew_s = self._clock()
            self.renewals += 1
        elif self._number is None or order.number < self._number:
            self._grew_s = float("-inf")  # the first one, or of a helper whose clock is behind: it must grow first
        self._number = order.number
        return order if self._clock() - self._grew_s <= EXPIRY_S else _NOBODY
