"""Makes the helper's changes: each job is read again first, and what an answer to a node did meanwhile comes first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.acting.apply import CHANGED, Applied, Outcome, apply
from slurm_gpushare.coschedule.acting.changes import Change
from slurm_gpushare.coschedule.acting.reread import is_same, read_again
from slurm_gpushare.coschedule.emptied.recent_view import RecentView, as_changed
from slurm_gpushare.slurm.interface import Slurm
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
