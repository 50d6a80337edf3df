"""The reasons of the jobs that wait, kept between ticks: worked out for new ones at once, for all now and then."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_gpushare.coschedule.planning.reasons import Reason
from slurm_gpushare.coschedule.planning.why_left import why_left
from slurm_gpushare.coschedule.policy_settings import PolicySettings
from slurm_gpushare.coschedule.view.snapshot import Plan, Snapshot
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel

REFRESH_S = 15.0


class WaitReasons:
    """Why jobs wait, by key. The plan itself does not need it, so it is not asked for at every tick."""

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}
        self._all_at_s = float("-inf")

    def update(
        self, snapshot: Snapshot, knowledge: Knowledge | KnowledgeByModel, settings: PolicySettings, plan: Plan
    ) -> Mapping[str, Reason]:
        """The reasons of the jobs that `plan` leaves to Slurm."""
        old = snapshot.now_s - self._all_at_s >= REFRESH_S or snapshot.now_s < self._all_at_s
        asked = [left for left in plan.left if old or left.key not in self._reasons]
        taken = {placement.partner_key for placement in plan.placements if placement.partner_key}
        found = why_left(snapshot, knowledge, settings, asked, taken) if asked else {}
        if old:
            self._all_at_s = snapshot.now_s
        known = self._reasons | found
        self._reasons = {left.key: known[left.key] for left in plan.left if left.key in known}
        return self._reasons
