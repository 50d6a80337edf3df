"""The queue, read again and again: most of it is as it was at the last look."""

from __future__ import annotations

from dataclasses import replace

from slurm_gpushare.slurm import values
from slurm_gpushare.slurm.queue import COLUMNS, Job, jobs_of_row, number
from slurm_gpushare.slurm.table import value_rows

# What Slurm works out anew every few minutes for jobs that nobody has touched.
_VOLATILE = tuple(COLUMNS.index(name) for name in ("prioritylong", "starttime", "endtime"))


class QueueReader:
    """Parses the queue again and again: rows that are as they were last time are not parsed again.

    Of ten thousand waiting jobs a handful changes from one look to the next.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[str, ...], tuple[Job, ...]]] = {}

    def parse(self, output: str, delimiter: str) -> list[Job]:
        """The jobs in squeue's answer; the same object for one that has not changed."""
        known, now = self._known, {}
        jobs: list[Job] = []
        for row in value_rows(output, len(COLUMNS), delimiter):
            volatile = tuple([row[at] for at in _VOLATILE])
            for at in _VOLATILE:
                row[at] = ""
            text = "\0".join(row)
            found = known.get(text)
            if found is None:
                for at, value in zip(_VOLATILE, volatile, strict=True):
                    row[at] = value
                found = volatile, jobs_of_row(dict(zip(COLUMNS, row, strict=True)))
            elif found[0] != volatile:
                priority, start, end = number(volatile[0]), values.integer(volatile[1]), values.integer(volatile[2])
                changed = (replace(job, priority=priority, start_s=start, end_s=end) for job in found[1])
                found = volatile, tuple(changed)
            now[text] = found
            jobs.extend(found[1])
        self._known = now
        return jobs
