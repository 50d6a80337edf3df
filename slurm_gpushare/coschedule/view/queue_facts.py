"""What is known of the jobs in the queue besides what Slurm tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_gpushare.coschedule.durations import UNKNOWN_SITE, UsualScatter
from slurm_gpushare.coschedule.view.occupancy import GpuAddress
from slurm_gpushare.store.gpu_models import own_name


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


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Everything besides Slurm that the snapshot needs."""

    workloads: Mapping[str, Mapping[str, TokenFacts]] = field(default_factory=dict)
    """By GPU model, as the cards call themselves, and then by token."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """What the cards of the site's models call themselves, by the site's name."""
    sharing: Mapping[int, SharingCost] = field(default_factory=dict)
    """By SLURM_JOB_ID."""
    card_mem_mib: Mapping[str, int] = field(default_factory=dict)
    """Memory of a node's GPUs, where telemetry has told it."""
    one_process: frozenset[GpuAddress] = frozenset()
    """Cards whose compute mode admits a single process, as telemetry has told."""
    default_card_mem_mib: Mapping[str, int] = field(default_factory=dict)
    """By GPU model, where no node has told yet."""
    never_together: frozenset[tuple[str, str]] = frozenset()
    measure_anew: frozenset[str] = frozenset()
    """Tokens that are no longer what was measured: nobody joins them and they join nobody until they were measured."""
    avoid: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By key: nodes that a job was sent to and did not start on."""
    longest_limit_s: Mapping[str, float] = field(default_factory=dict)
    """MaxTime of partitions that have one."""

    def on(self, model: str, token: str | None) -> TokenFacts:
        """What is known of a token on a GPU model."""
        return self.workloads.get(model, {}).get(token or "", TokenFacts())

    def models_of(self, token: str | None) -> list[str]:
        """The GPU models on which a token was measured, the site's own first."""
        measured = [model for model, tokens in self.workloads.items() if token in tokens]
        return sorted(measured, key=lambda model: (model not in self.own_names.values(), model))

    def own_name(self, site_model: str) -> str:
        return self.own_names.get(site_model, own_name(site_model))
