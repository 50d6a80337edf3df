"""The report's section "in the shadow": what sharing would have done while ``Policy=shadow``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slurm_gpushare.cli.assess import cards_of, past_job
from slurm_gpushare.cli.output import progress
from slurm_gpushare.config import Config
from slurm_gpushare.coschedule.acting.explain import SHADOW
from slurm_gpushare.coschedule.pairs.site_knowledge import SiteKnowledge
from slurm_gpushare.coschedule.planning.reasons import duration_text
from slurm_gpushare.coschedule.policy_settings import PolicySettings
from slurm_gpushare.report.assess_page import durations, span
from slurm_gpushare.report.summary import Report
from slurm_gpushare.simulate.shadow import MOST_JOBS, RUNS, SLOWED_PCT, KnownTokens, ShadowFigures, in_the_shadow
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.store.store import Store


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
    jobs = [line.job for line in report.jobs]
    ended = [job for job in jobs if job.start_s and job.end_s and job.elapsed_s > 0 and cards_of(job)]
    past = [replace(past_job(job), token=_token(job), limit_s=job.limit_s) for job in ended]
    settings = replace(PolicySettings.from_config(config), policy="gpushare")
    known = known_tokens(store, config, ended)
    with progress("Simulating", RUNS * min(len(past), MOST_JOBS)) as bar:
        return Shadow(recorded, in_the_shadow(past, known, settings, _gpus(slurm, config), bar.update))


def _token(job: AccountedJob) -> str | None:
    """The token by which it would have shared; the first run of a workload is measured alone."""
    return job.tag.token if job.tag and not job.tag.probe else None


def known_tokens(store: Store, config: Config, jobs: Sequence[AccountedJob]) -> KnownTokens:
    """What the store knows of the jobs' tokens, each on that shared GPU model on which it was measured last.

    Tokens of two models never share in the simulation.
    """
    of_token = {token: job for job in jobs if (token := _token(job))}
    knowledge = SiteKnowledge(store, config.gpu_models, writes=False)
    shared = [learner.gpu_model for learner in knowledge.learners]
    by_model = store.profiles.by_model(of_token)
    here = sorted((p for name in shared for p in by_model.get(name, {}).values()), key=lambda p: p.updated_s)
    profiles = {profile.token: profile for profile in here}
    tokens = tuple(sorted(profiles))
    model = np.array([profiles[token].gpu_model for token in tokens], object)
    mean = low = np.ones((len(tokens), len(tokens)))
    for name in shared:
        table = knowledge.on(name).rates(tokens, tokens)
        both = (model == name)[:, None] & (model == name)
        mean, low = np.where(both, table.mean, mean), np.where(both, table.low, low)
    mem_mib = np.array([profiles[token].mem_used_mib for token in tokens], float)
    total_mib = np.array([profiles[token].mem_total_mib for token in tokens], float)
    room_mib = np.minimum(total_mib[:, None], total_mib) * (1.0 - config.memory_headroom_pct / 100.0)
    fits = mem_mib[:, None] + mem_mib <= room_mib
    owner = np.array([_owner(of_token[token], config.share_across) for token in tokens], object)
    may_share = fits & (owner[:, None] == owner) & (model[:, None] == model)
    return KnownTokens(tokens, mean, low, may_share)


def _owner(job: AccountedJob, share_across: str) -> str:
    return {"user": job.user, "account": job.account}.get(share_across, "")


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
