"""What sharing would have done in a period under `Policy=shadow`: its jobs again in the simulator, alone and sharing.

Unlike `assess`, the store knows the workloads by then: only jobs that asked to share take part, the plan believes what
was learned of their tokens, and goes by their real time limits. How fast two tokens really run side by side was never
seen, so the runs are done with all rates between the pessimistic end of what is believed and as far above its mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slurm_gpushare.helper.explain import SHADOW
from slurm_gpushare.helper.housekeeping import kept_tokens
from slurm_gpushare.helper.learner import SiteKnowledge
from slurm_gpushare.knowledge.rates import Bools, Floats, RateTable
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.policy import PolicySettings
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.text import duration_text, durations, span
from slurm_gpushare.slurm.accounting import AccountedJob
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store.store import Store
from slurm_gpushare.whatif.assess import Band, PastJob, as_simulated, cards_of, most_in_use, past_job
from slurm_gpushare.whatif.our_policy import BelievedRates, Gpushare, Options
from slurm_gpushare.whatif.simulate import Fifo, run
from slurm_gpushare.whatif.traces import MeasuredPairs, SimulatedJobs
from slurm_gpushare.whatif.world import World, metrics, percentile

SHIFTS = (-1.0, 0.0, 1.0)
"""How far the true rates of a run lie from the mean: -1 is the pessimistic end."""
MOST_JOBS = 5000
"""The last so many of a period are simulated: a report is asked for more often than an assessment."""
LEAST_RATE = 0.02
NO_LIMIT_S = 30 * 86400.0
"""Taken for the limit of a job that has none."""


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What is believed of the tokens' rates beside each other; row: the job, column: its neighbour."""

    tokens: tuple[str, ...]
    mean: Floats
    low: Floats
    can_share: Bools

    def padded(self, table: Floats, value: float) -> Floats:
        """A table with one more kind: the jobs that take no part."""
        return np.pad(table, (0, 1), constant_values=value)

    def pairs(self, shift: float) -> MeasuredPairs:
        """The rates as they may really be."""
        rate = np.clip(self.mean + shift * (self.mean - self.low), LEAST_RATE, 1.0)
        return MeasuredPairs((*self.tokens, ""), self.padded(np.where(self.can_share, rate, np.nan), np.nan))


def token_of(job: AccountedJob) -> str | None:
    """The token by which it would have shared; the first run of a workload is measured alone."""
    return job.tag.token if job.tag and not job.tag.probe else None


def known_tokens(store: Store, config: Config, jobs: Sequence[AccountedJob]) -> KnownTokens:
    """What the store knows of the jobs' tokens, each on that shared GPU model on which it was measured last.

    Tokens of two models never share in the simulation.
    """
    of_token = {token: job for job in jobs if (token := token_of(job))}
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


@dataclass(frozen=True, slots=True)
class ShadowFigures:
    """What would have been shared, saved and slowed. Waits are means over all jobs, slow-down over those that share."""

    jobs: int
    all_jobs: int
    """Before the period was cut to what can be simulated."""
    takes_part: int
    """Jobs of tokens that the store knows, but for the first run of each, which is measured alone."""
    gpus: int
    gpu_hours: float
    observed_wait_s: float
    plain_wait_s: float
    """As they wait in the simulator without sharing: how far to believe it."""
    shared_jobs: Band
    saved_gpu_h: Band
    saved_pct: Band
    wait_s: Band
    isd_mean_pct: Band
    isd_p95_pct: Band
    slowed_jobs: Band
    """Jobs that would have taken over 10 % longer."""


SLOWED_PCT = 10.0
RUNS = 1 + len(SHIFTS)
"""Simulations of all jobs: alone, and with each of the rates."""


def in_the_shadow(
    jobs: Sequence[PastJob],
    known: KnownTokens,
    settings: PolicySettings,
    gpus: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ShadowFigures | None:
    """The figures of the jobs that ended in a period; None if there is none."""
    cards = gpus or most_in_use(jobs)
    ordered = sorted((job for job in jobs if job.gpus <= cards), key=lambda job: job.submit_s)[-MOST_JOBS:]
    if not ordered:
        return None
    plain_work = _work(ordered, known, cards, 0.0)
    plain = metrics(run(plain_work, Fifo(plain_work, 0), progress))
    worlds = [_share(ordered, known, settings, cards, shift, progress) for shift in SHIFTS]
    hours = float(np.sum(plain_work.duration_s * plain_work.num_gpus)) / 3600.0
    found = [metrics(world) for world in worlds]
    slow = [_isd_pct(world) for world in worlds]
    saved = [plain["busy_gpu_hours"] - figures["busy_gpu_hours"] for figures in found]
    return ShadowFigures(
        jobs=len(ordered),
        all_jobs=len(jobs),
        takes_part=int(np.sum(plain_work.profile < len(known.tokens))),
        gpus=cards,
        gpu_hours=hours,
        observed_wait_s=float(np.mean([job.wait_s or 0.0 for job in ordered])),
        plain_wait_s=plain["avg_wait_s"],
        shared_jobs=Band.of([float(world.shared.sum()) for world in worlds]),
        saved_gpu_h=Band.of(saved),
        saved_pct=Band.of([100.0 * value / hours for value in saved]),
        wait_s=Band.of([figures["avg_wait_s"] for figures in found]),
        isd_mean_pct=Band.of([float(isd.mean()) if len(isd) else 0.0 for isd in slow]),
        isd_p95_pct=Band.of([percentile(isd, 95) for isd in slow]),
        slowed_jobs=Band.of([float(np.sum(isd > SLOWED_PCT)) for isd in slow]),
    )


def _work(jobs: Sequence[PastJob], known: KnownTokens, cards: int, shift: float) -> SimulatedJobs:
    kind, others = {token: i for i, token in enumerate(known.tokens)}, len(known.tokens)
    profile = [kind.get(job.token or "", others) if job.gpus == 1 else others for job in jobs]
    return as_simulated(jobs, cards, np.array(profile, np.int64), known.pairs(shift))


def _share(
    jobs: Sequence[PastJob],
    known: KnownTokens,
    settings: PolicySettings,
    cards: int,
    shift: float,
    progress: Callable[[int], None] | None,
) -> World:
    work = _work(jobs, known, cards, shift)
    policy = Gpushare(work, 0, Options("oracle", "history", "priority", settings))
    # What the store knows, and nothing of what this run shows.
    policy.seen = BelievedRates(work, settings, RateTable(known.padded(known.mean, 1.0), known.padded(known.low, 1.0)))
    limit_s = np.array([job.limit_s or NO_LIMIT_S for job in jobs], float)
    policy.durations.limited(np.maximum(limit_s, work.duration_s))
    return run(work, policy, progress)


def _isd_pct(world: World) -> Floats:
    """Of the jobs that shared."""
    isd = (world.ran_s / world.work.duration_s - 1.0) * 100.0
    return np.maximum(isd[world.shared], 0.0)


# What a report says of it.


def gpus_that_share(slurm: Slurm, config: Config) -> int | None:
    """GPUs of the nodes that share; None where slurmctld does not answer."""
    try:
        nodes = slurm.nodes()
    except SlurmError:
        return None
    return sum(len(node.gpus) for node in nodes if set(node.partitions) & set(config.partitions)) or None


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

    def lines(self) -> list[tuple[str, str]]:
        """For people, name and text."""
        placed = sum(self.recorded.values())
        beside = placed - self.recorded.get("alone", 0) - self.recorded.get("unshared", 0)
        lines = [
            ("recorded", f"{placed} jobs would have been placed, {beside} of them beside another; nothing was changed")
        ]
        found = self.figures
        if found is None:
            return [*lines, ("simulated", "--- (no job has ended)")]
        band = asdict(found)
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
            ("mean wait", f"{durations(band['wait_s'])} with sharing, {duration_text(found.plain_wait_s)} in the"
             f" simulator without; they really waited {duration_text(found.observed_wait_s)}"),
            ("the range", "how fast two jobs run side by side was predicted, not seen: from the pessimistic end of what"
             " is believed to as far above its mean"),
        ]  # fmt: skip


def shadow_of(
    slurm: Slurm,
    store: Store,
    config: Config,
    jobs: Sequence[AccountedJob],
    period_s: tuple[float, float],
    progress: Callable[[int], Any],
) -> Shadow | None:
    """The section of a report of `jobs`, where its period was in the shadow at least in part.

    `progress` is told how many jobs will be simulated, and returns a bar.
    """
    recorded = Counter(str(d.reasons.get("how", "")) for d in store.decisions.between(*period_s) if d.kind == SHADOW)
    if not recorded and config.policy != SHADOW:
        return None
    ended = [job for job in jobs if job.start_s and job.end_s and job.elapsed_s > 0 and cards_of(job)]
    tokens = kept_tokens(store, [job for job in ended if job.tag is not None and job.tag.token is None])
    ended = [
        replace(job, tag=replace(job.tag, token=tokens[job.raw_id].token)) if job.tag and job.raw_id in tokens else job
        for job in ended
    ]
    past = [replace(past_job(job), token=token_of(job), limit_s=job.limit_s) for job in ended]
    settings = replace(PolicySettings.from_config(config), policy="gpushare")
    known = known_tokens(store, config, ended)
    with progress(RUNS * min(len(past), MOST_JOBS)) as bar:
        return Shadow(recorded, in_the_shadow(past, known, settings, gpus_that_share(slurm, config), bar.update))
