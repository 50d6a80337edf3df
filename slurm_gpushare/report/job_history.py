"""What is known of jobs besides what Slurm tells, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_gpushare.node.figures import RunFigures
from slurm_gpushare.protocol.history import Decision, Span
from slurm_gpushare.slurm.values import array_of
from slurm_gpushare.store.published import PublicJob


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


# Whose decisions these are: a task that waits has its array's id, and gets one of its own when it starts.


def by_own_id(decisions: Iterable[Decision], raw_ids: Mapping[str, int]) -> list[Decision]:
    """Each decision under the SLURM_JOB_ID of the job that its key names, as far as `raw_ids` knows the key."""
    found = []
    for decision in decisions:
        own = raw_ids.get(str(decision.reasons.get("key")), decision.job_id)
        found.append(decision if own == decision.job_id else replace(decision, job_id=own))
    return found


def of_job(decisions: Iterable[Decision], raw_id: int, key: str) -> list[Decision]:
    """The decisions about one job, those from before it had its own id among them."""
    mine = {raw_id, array_of(key)}
    own = (d for d in decisions if d.job_id in mine and d.reasons.get("key", key) == key)
    return by_own_id(own, {key: raw_id})
