"""What is known of the jobs in the queue besides what Slurm tells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from slurm_gpushare.helper import log
from slurm_gpushare.helper.durations import UNKNOWN_SITE, UsualScatter, usual_scatter
from slurm_gpushare.helper.explain import DONE
from slurm_gpushare.helper.gpu_limits import SiteLimits
from slurm_gpushare.helper.loop import Work
from slurm_gpushare.helper.occupancy import GpuAddress, token_of
from slurm_gpushare.helper.preemption import PreemptionRules
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.history import OUTSIDERS
from slurm_gpushare.protocol.record import UNTOLD_MOST_S, Mps, Record
from slurm_gpushare.slurm.accounting import Qos
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import Node, Partition, Reservation
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.refine import REMEMBERED_RUNS
from slurm_gpushare.store.store import Store
from slurm_gpushare.store.workloads import LOG_DURATION, Profile, models_of, own_name


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What the store knows of a token."""

    cluster: int | None = None
    mem_used_mib: int | None = None
    duration_s: float | None = None
    duration_scatter: float | None = None  # of the logarithm; None for a single run
    runs: int = 1  # that these come from
    usual_scatter: UsualScatter = UNKNOWN_SITE  # of the site's tokens


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What a running job has been through on its card."""

    lost_s: float = 0.0
    joined: bool = False
    """A guest, under the guest's promise."""
    judged: bool = False
    """Whether its nodes have told how fast it and its present neighbour run."""


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Everything besides jobs and nodes that the snapshot needs."""

    workloads: Mapping[str, Mapping[str, TokenFacts]] = field(default_factory=dict)
    """By GPU model, as the cards call themselves, and then by token."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """What the cards of the site's models call themselves, by the site's name."""
    sharing: Mapping[int, SharingCost] = field(default_factory=dict)
    """By SLURM_JOB_ID."""
    card_mem_mib: Mapping[str, int] = field(default_factory=dict)
    """Memory of a node's GPUs, where telemetry has told it."""
    one_process: frozenset[GpuAddress] = frozenset()
    """Cards whose compute mode admits a single process, or of which nobody can say who uses them, by telemetry."""
    mps: Mapping[GpuAddress, Mps] = field(default_factory=dict)
    """Cards under an MPS server, as telemetry has told."""
    blind: frozenset[GpuAddress] = frozenset()
    """Those of them that tell nothing of single processes."""
    off: frozenset[GpuAddress] = frozenset()
    """Cards that an administrator has taken out of sharing, and those that are lost or report errors."""
    default_card_mem_mib: Mapping[str, int] = field(default_factory=dict)
    """By GPU model, where no node has told yet."""
    never_together: frozenset[tuple[str, str]] = frozenset()
    measure_anew: frozenset[str] = frozenset()
    """Tokens that are no longer what was measured: nobody joins them and they join nobody until they were measured."""
    avoid: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By key: nodes that a job was sent to and did not start on."""
    longest_limit_s: Mapping[str, float] = field(default_factory=dict)
    """MaxTime of partitions that have one."""
    preemption: PreemptionRules = field(default_factory=PreemptionRules)
    limits: SiteLimits = field(default_factory=SiteLimits)
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Each partition's PriorityTier: Slurm looks at it before the priority."""
    reservations: Sequence[Reservation] = ()
    mean_duration_s: Mapping[int, float] = field(default_factory=dict)
    """Of jobs, by width."""

    def on(self, model: str, token: str | None) -> TokenFacts:
        """What is known of a token on a GPU model."""
        return self.workloads.get(model, {}).get(token or "", TokenFacts())

    def models_of(self, token: str | None) -> list[str]:
        """The GPU models on which a token was measured, the site's own first."""
        measured = [model for model, tokens in self.workloads.items() if token in tokens]
        return sorted(measured, key=lambda model: (model not in self.own_names.values(), model))

    def own_name(self, site_model: str) -> str:
        return self.own_names.get(site_model, own_name(site_model))


# What the store knows that the snapshot needs.


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


_CARD_FAULT, _MPS_FAULT = "card-fault", "mps-fault"


class StoreReader:
    """Reads facts from the store once a tick."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._card_mem_mib: dict[str, int] = {}
        self._latest: dict[GpuAddress, Record] = {}
        self._faults: dict[tuple[GpuAddress, str], set[int]] = {}
        """Cards in trouble, by kind of decision, with the jobs whose records said so."""
        self._outsiders: dict[GpuAddress, str] = {}
        """Cards on which processes of no job were seen, and during which run that was said."""
        self._records_since_s = 0.0
        self.to_tell: list[tuple[int, str]] = []
        """Jobs whose owners are to hear of their card's trouble, with the kind of decision that tells them."""
        self.records: list[Record] = []
        """The interim records of the last two minutes, one for each running job."""

    def read(
        self,
        jobs: Collection[Job],
        sharing: Mapping[int, SharingCost],
        avoid: Mapping[str, frozenset[str]],
        now_s: float,
        site_models: Sequence[str],
    ) -> QueueFacts:
        """Facts about the jobs that are in the queue now."""
        profiles = self._store.profiles.by_model(tokens_in(jobs))
        self.records = self._store.live.since(self._records_since_s)
        for record in self.records:
            if record.features.mem_total_mib:
                self._card_mem_mib[record.node] = int(record.features.mem_total_mib)
            card = GpuAddress(record.node, record.gpu_index)
            self._latest[card] = record
            self._say_outsiders(card, record)
            self._note_faults(card, record)
        self._records_since_s = now_s - 120.0
        running = {job.raw_id for job in jobs if job.running}  # once they have left MPS is started anew
        closed = {card for (card, kind), known in self._faults.items() if kind == _MPS_FAULT and known & running}
        return QueueFacts(
            workloads={model: facts_by_token(found) for model, found in profiles.items()},
            own_names=models_of(self._store.database, site_models),
            sharing=sharing,
            card_mem_mib=dict(self._card_mem_mib),
            one_process=frozenset(
                card for card, it in self._latest.items() if it.one_process or it.untold_s >= UNTOLD_MOST_S
            )
            | closed,
            mps={card: record.mps for card, record in self._latest.items() if record.mps},
            blind=frozenset(card for card, record in self._latest.items() if record.blind),
            off=frozenset(
                {GpuAddress(card.node, card.gpu) for card in self._store.knowledge.off_cards()}
                | {card for card, kind in self._faults if kind == _CARD_FAULT}
            ),
            # Where a node has not told yet, the smallest card of the model on which any of these jobs was seen.
            default_card_mem_mib={
                model: min(profile.mem_total_mib for profile in found.values()) for model, found in profiles.items()
            },
            never_together=self._store.sharing.banned(now_s),
            measure_anew=self._store.violations.to_measure(),
            avoid=avoid,
        )

    def _note_faults(self, card: GpuAddress, record: Record) -> None:
        found = {_CARD_FAULT: record.unsound, _MPS_FAULT: record.mps is Mps.NOBODY}
        for index, kind in product(range(card.index, card.index + record.gpus), found):
            key = GpuAddress(card.node, index), kind
            if not found[kind] and kind == _MPS_FAULT:
                self._faults.get(key, set()).discard(record.job_id)  # the other one's record may be older
            elif not found[kind]:
                self._faults.pop(key, None)
            elif record.job_id not in (known := self._faults.setdefault(key, set())):
                known.add(record.job_id)
                self.to_tell.append((record.job_id, kind))
                log.warning(kind, gpu=f"{card.node}:{index}", job=record.job_id, message=DONE[kind])

    def _say_outsiders(self, card: GpuAddress, record: Record) -> None:
        if record.outsiders and self._outsiders.get(card) != record.run_id:
            self._outsiders[card] = record.run_id
            self._store.counters.add({OUTSIDERS: 1})
            log.warning("outsiders", gpu=card, job=record.job_id, message="processes of no job use it; 'gpushare "
                        "doctor' on the node says whose they are")  # fmt: skip


# What changes rarely at a site: asked for when it matters, remembered in between.


PARTITIONS_FOR_S = 600.0
QOS_FOR_S = 300.0
RESERVATIONS_FOR_S = 60.0


class SiteCache:
    """Partitions, reservations and QOS, so that most ticks ask for none: at most one of the first two in one tick."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._partitions: list[Partition] = []
        self._partitions_at_s = float("-inf")
        self._reservations: list[Reservation] = []
        self._reservations_at_s = float("-inf")
        self._qos: list[Qos] = []
        self.limits = SiteLimits()
        """Limits on GPUs, as far as they were asked for yet."""
        self._qos_at_s = float("-inf")
        self.slurm_conf: Mapping[str, str] = {}
        """Slurm's configuration, as far as it was asked for yet."""

    async def refresh(self, nodes: Collection[Node], jobs: Collection[Job], now_s: float) -> None:
        """Ask for what is old; at once for reservations when a node or a job is seen in an unknown one."""
        if self._wants_reservations(nodes, jobs, now_s):
            self._reservations = await Work(self._slurm.reservations)
            self._reservations_at_s = now_s
        elif now_s - self._partitions_at_s >= PARTITIONS_FOR_S:
            self._partitions = await Work(self._slurm.partitions)
            self._partitions_at_s = now_s
        if now_s - self._qos_at_s >= QOS_FOR_S and self._wants_qos:
            self._qos_at_s = now_s
            with suppress(SlurmError):  # what was known goes on to count
                self._qos, self.limits = await Work(self._accounted, self.slurm_conf)

    def _wants_reservations(self, nodes: Collection[Node], jobs: Collection[Job], now_s: float) -> bool:
        known = {name for reservation in self._reservations for name in reservation.nodes}
        names = {reservation.name for reservation in self._reservations}
        unknown = any(node.reserved and node.name not in known for node in nodes) or any(
            job.reservation and job.reservation not in names for job in jobs
        )
        age_s = now_s - self._reservations_at_s
        return age_s >= RESERVATIONS_FOR_S or (unknown and age_s >= 5.0)

    @property
    def _wants_qos(self) -> bool:
        enforced = self.slurm_conf.get("AccountingStorageEnforce", "")
        return self.slurm_conf.get("PreemptType") == "preempt/qos" or "limits" in enforced or "safe" in enforced

    def _accounted(self, slurm_conf: Mapping[str, str]) -> tuple[list[Qos], SiteLimits]:
        return self._slurm.qos(), SiteLimits.of(slurm_conf, self._slurm.limits())

    @property
    def preemption(self) -> PreemptionRules:
        """Who may preempt whom, as far as it was asked yet."""
        return PreemptionRules.of(self.slurm_conf, self._partitions, self._qos)

    def added_to(self, facts: QueueFacts) -> QueueFacts:
        """The facts with what is known of partitions and reservations."""
        limits = {item.name: float(item.max_time_s) for item in self._partitions if item.max_time_s is not None}
        tiers = {item.name: int(item.fields.get("PriorityTier", "1")) for item in self._partitions}
        return replace(
            facts, longest_limit_s=limits, tiers=tiers, reservations=self._reservations, limits=self.limits,
            preemption=self.preemption,
        )  # fmt: skip

    def most_s(self, partitions: Collection[str]) -> float:
        """The longest time limit that these partitions allow, as far as they were asked yet."""
        limits = [partition.max_time_s for partition in self._partitions if partition.name in partitions]
        return min((float(limit) for limit in limits if limit is not None), default=float("inf"))
