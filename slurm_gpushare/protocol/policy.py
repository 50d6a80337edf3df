"""The part of gpushare.conf that decides who shares with whom."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from slurm_gpushare.protocol.settings import DEFAULTS, Config, SitePromises


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the plan needs to know besides the snapshot; percentages as in gpushare.conf."""

    policy: str = DEFAULTS.policy
    objective: str = DEFAULTS.objective  # completion or saving
    share_across: str = DEFAULTS.share_across  # any, account or user
    mps: str = DEFAULTS.mps
    resident_budget_pct: float = DEFAULTS.resident_budget_pct
    guest_cap_pct: float = DEFAULTS.guest_cap_pct
    memory_headroom_pct: float = DEFAULTS.memory_headroom_pct
    stops: bool = True  # whether nodes tell of losses while jobs share, and stop guests that cost too much
    limit_margin_pct: float = 5.0  # shared ends stay this far inside the time limits
    extend_time_limit: bool = DEFAULTS.extend_time_limit
    aged_s: float = 86_400.0  # a job that has waited this long goes first
    express_factor: float = 3.0  # guests are at most this many mean durations long
    seed: int = 0  # of the policy "random"
    partners: tuple[int, ...] = (0, 1, 2)  # for each cluster the one beside it under "paper"; by the base in force

    @classmethod
    def from_config(cls, config: Config) -> PolicySettings:
        same = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(**same, stops=config.on_slowdown == "pause")

    @property
    def for_plan(self) -> PolicySettings:
        """What the plan goes by: in the shadow it decides as it would if it counted."""
        return replace(self, policy="gpushare") if self.policy == "shadow" else self

    @property
    def promises(self) -> SitePromises:
        return SitePromises(self.resident_budget_pct, self.guest_cap_pct)
