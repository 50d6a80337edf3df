"""Arrays as Slurm writes them: waiting tasks ``0-20:4,25,30-31%2``, a task's key ``6_2``."""

from __future__ import annotations

import re

_MOST = 4_000_001  # Slurm's own bound of MaxArraySize
_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def expand_tasks(expression: str) -> tuple[int, ...]:
    """The task numbers, in their order; ValueError for anything else, such as a list that Slurm cut off (``...``)."""
    tasks: list[int] = []
    for item in expression.strip().strip("[]").partition("%")[0].split(","):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"'{expression}' names no array tasks")
        first, last, step = found.groups()
        if int(last or first) - int(first) + len(tasks) > _MOST or int(step or 1) == 0:
            raise ValueError(f"'{expression[:60]}' names too many array tasks")
        tasks.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(tasks)


def array_of(key: str) -> int:
    """``6`` of 6_2, the id that the tasks of an array have while they wait together; a lone job's own."""
    return int(re.split(r"[_+]", key)[0])
