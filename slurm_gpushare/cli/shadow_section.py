"""The report's section "in the shadow": what sharing would have done while ``Policy=shadow``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurm_gpushare.cli.output import progress
from slurm_gpushare.helper.explain import SHADOW
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.report.summary import Report
from slurm_gpushare.report.text import duration_text, durations, span
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store.store import Store
from slurm_gpushare.whatif.assess import cards_of, past_job
from slurm_gpushare.whatif.shadow import (
    MOST_JOBS,
    RUNS,
    SLOWED_PCT,
    ShadowFigures,
    in_the_shadow,
    known_tokens,
    token_of,
)


@dataclass(frozen=True, slots=True)
class Shadow:
    """What the helper recorded, and what the simulator makes of the period."""

    recorded: Mapping[str, int]
    """Jobs that the helper would have placed, by how, at the first moment at which it would have."""
    figures: ShadowFigures | None
    """None where no job of the period has ended."""

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"recorded": dict(self.recorded), "simulated": asdict(self.figures) if self.figures else None}


def shadow_of(slurm: Slurm, store: Store, config: Config, report: Report) -> Shadow | None:
    """The section, where the period was in the shadow at least in part."""
    decisions = store.decisions.between(report.start_s, report.end_s)
    recorded = Counter(str(item.reasons.get("how", "")) for item in decisions if item.kind == SHADOW)
    if not recorded and config.policy != SHADOW:
        return None
    jobs = [job.accounted for job in report.jobs]
    ended = [job for job in jobs if job and job.start_s and job.end_s and job.elapsed_s > 0 and cards_of(job)]
    past = [replace(past_job(job), token=token_of(job), limit_s=job.limit_s) for job in ended]
    settings = replace(PolicySettings.from_config(config), policy="gpushare")
    known = known_tokens(store, config, ended)
    with progress("Simulating", RUNS * min(len(past), MOST_JOBS)) as bar:
        return Shadow(recorded, in_the_shadow(past, known, settings, _gpus(slurm, config), bar.update))


def _gpus(slurm: Slurm, config: Config) -> int | None:
    """GPUs of the nodes that share; None where slurmctld does not answer."""
    try:
        nodes = slurm.nodes()
    except SlurmError:
        return None
    return sum(len(node.gpus) for node in nodes if set(node.partitions) & set(config.partitions)) or None


def shadow_lines(shadow: Shadow) -> list[tuple[str, str]]:
    """The section's lines, name and text."""
    placed = sum(shadow.recorded.values())
    beside = placed - shadow.recorded.get("alone", 0) - shadow.recorded.get("unshared", 0)
    lines = [
        ("recorded", f"{placed} jobs would have been placed, {beside} of them beside another; nothing was changed")
    ]
    found = shadow.figures
    if found is None:
        return [*lines, ("simulated", "--- (no job has ended)")]
    band = {name: asdict(value) for name, value in _bands(found).items()}
    return [
        *lines,
        ("simulated", f"{found.jobs} of {found.all_jobs} jobs that ended, on {found.gpus} GPUs;"
         f" {found.takes_part} would take part"),
        ("would share", f"{span(band['shared_jobs'])} jobs"),
        ("would save", f"{span(band['saved_gpu_h'], ',.1f', ' h')} of {found.gpu_hours:,.1f} GPU hours,"
         f" {span(band['saved_pct'], '.0f', ' %')}"),
        ("slow-down (ISD)", f"mean {span(band['isd_mean_pct'], '.0f', ' %')}, p95"
         f" {span(band['isd_p95_pct'], '.0f', ' %')} of those that would share;"
         f" {span(band['slowed_jobs'])} jobs by more than {SLOWED_PCT:.0f} %"),
        ("mean wait", f"{durations(band['wait_s'])} with sharing, {duration_text(found.plain_wait_s)} in the simulator"
         f" without; they really waited {duration_text(found.observed_wait_s)}"),
        ("the range", "how fast two jobs run side by side was predicted, not seen: from the pessimistic end of what is"
         " believed to as far above its mean"),
    ]  # fmt: skip


def _bands(found: ShadowFigures) -> dict[str, Any]:
    names = ("shared_jobs", "saved_gpu_h", "saved_pct", "isd_mean_pct", "isd_p95_pct", "slowed_jobs", "wait_s")
    return {name: getattr(found, name) for name in names}
