"""Slurm's short form of node names: ``gpu[0-3,7],login1``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from slurm_gpushare.slurm.errors import SlurmError

MOST_NAMES = 1 << 17
"""In one expression: twice what Slurm itself takes. A broken answer must not take the machine's memory."""
_BRACKET = re.compile(r"\[([^\]]*)\]")


def _split(expression: str) -> list[str]:
    """Split at commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(expression):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(expression[start:position])
            start = position + 1
    return [part for part in [*parts, expression[start:]] if part]


def _numbers(ranges: str) -> Iterable[str]:
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not last:
            yield first
            continue
        if not (first.isdecimal() and last.isdecimal() and int(last) - int(first) < MOST_NAMES):
            raise SlurmError(f"'{ranges[:60]}' is no range of nodes", "This Slurm release is not known.")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


@lru_cache(maxsize=4096)
def expand(expression: str) -> tuple[str, ...]:
    """The names that an expression stands for, in its order."""
    names: list[str] = []
    for part in _split(expression.strip()):
        pieces = _BRACKET.split(part)
        options = [[piece] if index % 2 == 0 else list(_numbers(piece)) for index, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, options)) > MOST_NAMES:
            raise SlurmError(f"'{expression[:60]}' stands for too many nodes", "This Slurm release is not known.")
        names.extend("".join(choice) for choice in product(*options))
    return tuple(names)
