"""What is known of jobs besides what Slurm tells, wherever it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_gpushare.history import Decision, Span
from slurm_gpushare.store.published import PublicJob
from slurm_gpushare.telemetry.figures import RunFigures


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What is known of one job besides what Slurm tells."""

    decisions: Sequence[Decision] = ()
    spans: Sequence[Span] = ()
    run: RunFigures | None = None
    live: PublicJob | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a period."""

    spans: Sequence[Span] = ()
    decisions: Sequence[Decision] = ()
    runs: Mapping[int, RunFigures] = field(default_factory=dict)
    complete: bool = False
    """Whether a job without a span is known not to have shared."""
