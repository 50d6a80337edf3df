"""Slurm's short form of node names: ``gpu[0-3,7],login1``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

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
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


@lru_cache(maxsize=4096)
def expand(expression: str) -> tuple[str, ...]:
    """The names that an expression stands for, in its order."""
    names: list[str] = []
    for part in _split(expression.strip()):
        pieces = _BRACKET.split(part)
        options = [[piece] if index % 2 == 0 else list(_numbers(piece)) for index, piece in enumerate(pieces)]
        names.extend("".join(choice) for choice in product(*options))
    return tuple(names)
