"""Why a job waits: a code that programs can count, the numbers behind it, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurm_gpushare.protocol.text import duration_text


class Code(StrEnum):
    """The reasons. At most 16 letters."""

    OFF = "off"
    SHADOW = "shadow"
    OWN_CAP = "own-cap"
    NO_PARTNER = "no-partner"
    PLACE = "place"
    PREEMPTION = "preemption"
    LIMIT = "limit"
    OWNERS = "owners"
    MPS_USER = "mps-user"
    MEMORY = "memory"
    TOO_LONG = "too-long"
    FORBIDDEN = "forbidden"
    PROMISE = "promise"
    EXPLORATION = "exploration"
    NOT_MEASURABLE = "not-measurable"
    TIME_LIMIT = "time-limit"
    PRIORITY = "priority"
    NO_GAIN = "no-gain"
    OTHERS_FIRST = "others-first"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits. Numbers that do not belong to the code are None."""

    code: Code
    need: float | None = None
    """What the job needs: MiB of GPU memory, seconds, or per cent of slow-down, by code."""
    have: float | None = None
    """The most that any card offers of it."""
    wait_s: float | None = None
    """Forecast of its wait."""


_WORDS: Mapping[Code, tuple[str, str]] = {
    Code.OFF: ("sharing is switched off", "the site's Policy"),
    Code.SHADOW: ("the site only works out what sharing would do", "the site's Policy"),
    Code.OWN_CAP: (
        "its owner accepts {need} % slow-down, and beside the best neighbour it could be up to {have} %",
        "a higher max= when it is submitted again",
    ),
    Code.NO_PARTNER: ("no card has a sharing job with room beside it", "a sharing job that starts"),
    Code.PLACE: (
        "no card with room beside it is on a node that the job may use and that has the CPUs and memory it asks for",
        "fewer CPUs, less memory, or fewer constraints",
    ),
    Code.PREEMPTION: (
        "the cards that it could join are being freed for a job that may preempt those on them",
        "that job's start",
    ),
    Code.LIMIT: (
        "a limit of its user, account or QOS on GPUs is reached, counted as the cards that its jobs hold",
        "one of those jobs that ends",
    ),
    Code.OWNERS: ("the site lets only jobs of one user or account share, and none of those has room", "ShareAcross"),
    Code.MPS_USER: ("MPS serves one user at a time on those cards, and none of that user's has room", "another card"),
    Code.MEMORY: (
        "it needs {need} MiB of GPU memory, and beside the best neighbour {have} MiB are free",
        "a neighbour that uses less, or a smaller batch",
    ),
    Code.TOO_LONG: (
        "it is expected to run {need}, and second halves go first to jobs of up to {have}",
        "a shorter job or time limit",
    ),
    Code.FORBIDDEN: ("every job it could join has slowed its workload too much before", "another neighbour"),
    Code.PROMISE: (
        "beside every job it could join, one of the two would be slowed by more than promised",
        "another neighbour, or one with more of its run left",
    ),
    Code.EXPLORATION: (
        "how it goes together with the jobs it could join is not known yet, and a trial could cost them too much",
        "a neighbour with more of its run left",
    ),
    Code.NOT_MEASURABLE: (
        "how it goes together with the jobs it could join is not known, and their cards tell nothing of single jobs",
        "a run beside them on a card without MPS",
    ),
    Code.TIME_LIMIT: (
        "sharing could make it, or the job it joins, miss its time limit",
        "a longer time limit",
    ),
    Code.PRIORITY: (
        "a job of higher priority waits for those cards, and this one could hold them up",
        "a time limit of at most {have}",
    ),
    Code.NO_GAIN: ("it is expected to finish sooner on a whole GPU", "a longer queue"),
    Code.OTHERS_FIRST: ("the places it could take went to other jobs", "one of those jobs that ends"),
    Code.PAUSED: (
        "it is paused, so that its neighbour gets the speed it was promised",
        "nothing; it goes on by itself",
    ),
}
_UNSHARED = ("its owner wants it unshared, or next to", "a higher max= in its comment")
_TIMES = frozenset({Code.TOO_LONG, Code.PRIORITY, Code.TIME_LIMIT})


def words(reason: Reason) -> tuple[str, str]:
    """The reason as a clause, and what would change it."""
    why, change = _UNSHARED if reason.code is Code.OWN_CAP and reason.have is None else _WORDS[reason.code]
    if reason.code is Code.PRIORITY and not reason.have:
        change = "nothing; that job goes first"
    show = duration_text if reason.code in _TIMES else _plain
    numbers = {"need": show(reason.need), "have": show(reason.have)}
    return why.format(**numbers), change.format(**numbers)


def _plain(value: float | None) -> str:
    return "---" if value is None or not math.isfinite(value) else f"{value:.0f}"


def sentence(reason: Reason) -> str:
    """One line for a log or a table."""
    why, change = words(reason)
    start = "" if reason.wait_s is None else f", its start is forecast in {duration_text(reason.wait_s)}"
    return f"waits{start}: {why}. What would change it: {change}"


def reason_of(told: Mapping[str, Any]) -> Reason | None:
    """Why a job waited, from the reasons of a decision; None if it was about something else, or of a later release."""
    try:
        code = Code(str(told["code"]))
    except (KeyError, ValueError):
        return None
    return Reason(code, told.get("need"), told.get("have"), told.get("wait_s"))
