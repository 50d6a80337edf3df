"""What the store knows that the snapshot needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slurm_gpushare.coschedule.durations import usual_scatter
from slurm_gpushare.coschedule.view.occupancy import GpuAddress
from slurm_gpushare.coschedule.view.queue_facts import QueueFacts, SharingCost, TokenFacts
from slurm_gpushare.coschedule.view.taking_part import token_of
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.combine import REMEMBERED_RUNS
from slurm_gpushare.store.gpu_models import models_of
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import LOG_DURATION, Profile
from slurm_gpushare.telemetry.record import Record


def tokens_in(jobs: Iterable[Job]) -> set[str]:
    """Tokens of the jobs that take part in sharing."""
    return {token for job in jobs if (token := token_of(job)) is not None}


def token_facts(profile: Profile) -> TokenFacts:
    """What the plan and the watch need of a profile."""
    scatter = profile.scatter.get(LOG_DURATION)
    runs = 1 if scatter is None else max(2, min(profile.runs, REMEMBERED_RUNS))
    return TokenFacts(profile.cluster, profile.mem_used_mib, profile.duration_s, scatter, runs)


def facts_by_token(profiles: Mapping[str, Profile]) -> dict[str, TokenFacts]:
    """The facts of tokens on one GPU model, each with how far runs of one token usually differ among these."""
    found = {token: token_facts(profile) for token, profile in profiles.items()}
    usual = usual_scatter(
        np.array([facts.duration_scatter or 0.0 for facts in found.values()], float),
        np.array([facts.runs for facts in found.values()], np.int64),
    )
    return {token: replace(facts, usual_scatter=usual) for token, facts in found.items()}


class StoreReader:
    """Reads facts from the store once a tick."""

    def __init__(self, store: Store, site_models: Sequence[str]) -> None:
        self._store = store
        self.site_models = site_models
        self._card_mem_mib: dict[str, int] = {}
        self._one_process: set[GpuAddress] = set()
        self._records_since_s = 0.0
        self.records: list[Record] = []
        """The interim records of the last two minutes, one for each running job."""

    def read(
        self,
        jobs: Collection[Job],
        sharing: Mapping[int, SharingCost],
        avoid: Mapping[str, frozenset[str]],
        now_s: float,
    ) -> QueueFacts:
        """Facts about the jobs that are in the queue now."""
        profiles = self._store.profiles.by_model(tokens_in(jobs))
        self.records = self._store.live.since(self._records_since_s)
        for record in self.records:
            if record.features.mem_total_mib:
                self._card_mem_mib[record.node] = int(record.features.mem_total_mib)
            change = self._one_process.add if record.one_process else self._one_process.discard
            change(GpuAddress(record.node, record.gpu_index))
        self._records_since_s = now_s - 120.0
        return QueueFacts(
            workloads={model: facts_by_token(found) for model, found in profiles.items()},
            own_names=models_of(self._store.database, self.site_models),
            sharing=sharing,
            card_mem_mib=dict(self._card_mem_mib),
            one_process=frozenset(self._one_process),
            # Where a node has not told yet, the smallest card of the model on which any of these jobs was seen.
            default_card_mem_mib={
                model: min(profile.mem_total_mib for profile in found.values()) for model, found in profiles.items()
            },
            never_together=self._store.sharing.banned(now_s),
            measure_anew=self._store.conduct.to_measure(),
            avoid=avoid,
        )
