"""Measuring pairs on purpose: commands run alone, then two by two, the least certain pairs first."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np

from slurm_gpushare.knowledge.rates import Knowledge
from slurm_gpushare.protocol.errors import BadInput, GpushareError
from slurm_gpushare.protocol.files import read_rows

Say = Callable[[str], None]


class CommandFailed(GpushareError):
    """A workload did not end well."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A workload that may be run here. The command is run and forgotten; only the token is kept."""

    token: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of two workloads that ran together; None if one of them failed beside the other, as without memory."""

    a: str
    b: str
    rate_a: float | None
    rate_b: float | None


def read_candidates(path: Path) -> list[Candidate]:
    """Read a CSV file with the columns token and command."""
    rows = read_rows(path, ("token", "command"))
    found = [Candidate(row.text("token"), tuple(shlex.split(row.text("command")))) for row in rows]
    if not found:
        raise BadInput(f"{path}: no workloads in it", "Give one row a workload: token,command.")
    if len({item.token for item in found}) < len(found):
        raise BadInput(f"{path}: a token twice", "Give each workload once.")
    return found


def widest_first(tokens: Sequence[str], knowledge: Knowledge) -> list[tuple[str, str]]:
    """All pairs, each token also beside its own kind, by how unsure the worse of both rates is."""
    table = knowledge.rates(tokens, tokens)
    width = np.log(table.mean) - np.log(table.low)
    width = np.maximum(width, width.T)
    places = combinations_with_replacement(range(len(tokens)), 2)
    ranked = sorted(places, key=lambda pair: (-width[pair], pair))
    return [(tokens[i], tokens[j]) for i, j in ranked]


def measure(candidates: Sequence[Candidate], knowledge: Knowledge, count: int, say: Say) -> Iterator[Measured]:
    """Run every workload alone once, then `count` pairs; what each pair shows is learned before the next is chosen.

    A workload that fails alone ends it; two that fail only together are a finding.
    """
    by_token = {item.token: item for item in candidates}
    alone = {}
    for item in candidates:
        alone[item.token] = _run([item])[0]
        say(f"{item.token} alone: {alone[item.token]:.1f} s")
    done: set[tuple[str, str]] = set()
    while len(done) < count:
        left = [pair for pair in widest_first([item.token for item in candidates], knowledge) if pair not in done]
        if not left:
            return
        a, b = left[0]
        done.add((a, b))
        try:
            ends = _run([by_token[a], by_token[b]])
        except CommandFailed as error:
            say(f"{a} and {b} do not fit together: {error}")
            yield Measured(a, b, None, None)
            continue
        rate_a, rate_b = rates_of(alone[a], alone[b], *ends)
        say(f"{a} at {rate_a:.3f}, {b} at {rate_b:.3f}")
        knowledge.observe(a, b, rate_a)
        knowledge.observe(b, a, rate_b)
        yield Measured(a, b, rate_a, rate_b)


def rates_of(alone_a_s: float, alone_b_s: float, end_a_s: float, end_b_s: float) -> tuple[float, float]:
    """Rates of two that started together, from when each ended: who ends last has the card alone at the end."""
    first = min(end_a_s, end_b_s)
    rate_a = (alone_a_s - (end_a_s - first)) / first
    rate_b = (alone_b_s - (end_b_s - first)) / first
    return float(np.clip(rate_a, 0.02, 1.0)), float(np.clip(rate_b, 0.02, 1.0))


def _run(items: Sequence[Candidate]) -> list[float]:
    """Start all together; seconds until each ended. A failure ends the others too."""
    start = time.monotonic()
    running: dict[int, subprocess.Popen[bytes]] = {}
    ended: dict[int, float] = {}
    try:
        for at, item in enumerate(items):
            running[at] = subprocess.Popen(item.argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while len(ended) < len(items):
            for at, process in running.items():
                if at not in ended and process.poll() is not None:
                    ended[at] = time.monotonic() - start
                    if process.returncode:
                        raise CommandFailed(f"{items[at].token}: its command ended with {process.returncode}")
            time.sleep(0.005)
    except OSError as error:
        raise BadInput(f"cannot run a command: {error}") from error
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    return [ended[at] for at in range(len(items))]
