"""What a fault is: it breaks one thing for real, lets the stream go on, and mends it as an administrator would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpushare_lab.chaos.site import ChaosSite

Pause = Callable[[float], None]
"""Lets the stream go on for so many seconds."""
Inject = Callable[[ChaosSite, Pause], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what may happen to jobs while it lasts that is Slurm's own doing."""

    name: str
    group: str
    inject: Inject
    kills: bool = False
    """Whether Slurm itself ends or requeues jobs because of it."""
    kinds: tuple[str, ...] = ()
    """Of the jobs that are submitted while it lasts, in turn; empty: the stream's own."""
    short: bool = False
    """Whether it is in the short form, which is part of ``make test``."""
