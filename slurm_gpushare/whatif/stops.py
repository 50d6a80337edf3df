"""Promises in the simulated cluster: who came last stands still, as the helper decides (`helper/promises.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slurm_gpushare.helper.promises import PauseHistory, PauseStep, PromiseStatus, next_step
from slurm_gpushare.helper.rules import VERDICT_S
from slurm_gpushare.knowledge.rates import Ints
from slurm_gpushare.protocol.settings import DEFAULTS
from slurm_gpushare.protocol.stop_orders import LONGEST_PAUSE_S
from slurm_gpushare.whatif.world import NOBODY, SAME_INSTANT_S, World

if TYPE_CHECKING:
    from slurm_gpushare.whatif.our_policy import Gpushare

LOOK_S = DEFAULTS.tick_s
ERROR = 0.05
"""How far a measured rate may be off, relative."""


class Stops:
    """Watches all pairs, each only when something may be due."""

    def __init__(self) -> None:
        self._begun = 0
        self._due_s: dict[tuple[int, int], float] = {}
        self._stopped_since_s: dict[int, float] = {}
        self._went_on_s: dict[int, float] = {}

    @property
    def wake_s(self) -> float:
        return min(self._due_s.values(), default=np.inf)

    def look(self, world: World, policy: Gpushare) -> None:
        """Stop those whose residents are about to lose more than promised, and let those go on who may."""
        for resident, guest, since_s in world.pairings_begun[self._begun :]:
            self._due_s[resident, guest] = since_s + VERDICT_S
        self._begun = len(world.pairings_begun)
        for pair, due_s in list(self._due_s.items()):
            if due_s <= world.now_s + SAME_INSTANT_S:
                self._judge(world, policy, *pair)

    def _judge(self, world: World, policy: Gpushare, resident: int, guest: int) -> None:
        pair, now_s = (resident, guest), world.now_s
        if world.gpu[guest] == NOBODY or world.gpu[guest] != world.gpu[resident]:
            del self._due_s[pair]
            self._stopped_since_s.pop(guest, None)
            return
        jobs = np.array(pair)
        of_resident, of_guest = self._statuses(world, policy, jobs)
        since_s = self._stopped_since_s.get(guest)
        most_s = DEFAULTS.pause_most_pct / 100.0 * max(of_guest.run_s, float(policy.durations.limit_s[guest]))
        history = PauseHistory(
            since_s, float(world.stood_s(jobs)[1]), now_s - self._went_on_s.get(guest, -np.inf), most_s
        )
        step = next_step(of_resident, of_guest, history, now_s, 2.0 * LOOK_S)
        if step is PauseStep.PAUSE:
            self._stopped_since_s[guest] = since_s = now_s
            world.stop_at_node(guest, still=True)
        elif step is not PauseStep.LEAVE:
            del self._stopped_since_s[guest]
            self._went_on_s[guest], since_s = now_s, None
            world.stop_at_node(guest, still=False)
        if since_s is not None:
            wait_s = min(LONGEST_PAUSE_S - (now_s - since_s), history.room_s) - 2.0 * LOOK_S
        elif history.room_s <= 2.0 * LOOK_S or of_resident.loss <= 0.0:
            wait_s = np.inf
        else:
            wait_s = of_resident.budget_s / of_resident.loss - 2.0 * LOOK_S
        self._due_s[pair] = now_s + max(wait_s, LOOK_S)

    def _statuses(self, world: World, policy: Gpushare, jobs: Ints) -> tuple[PromiseStatus, PromiseStatus]:
        ahead, promises = policy.ahead(world, jobs), policy.promise_pct(world, jobs)
        run_s = ahead.done_s + ahead.left.low_s
        lost_s = world.now_s - world.start_s[jobs] - ahead.done_s
        kinds = world.work.profile[jobs]
        rates = world.rate_of[kinds, kinds[::-1]]
        shared_s = world.now_s - world.start_s[jobs].max() - world.stood_s(jobs)[1]
        numbers = np.column_stack((promises, run_s, lost_s, np.full(2, shared_s), 1.0 - rates, ERROR * rates)).tolist()
        return PromiseStatus(*numbers[0]), PromiseStatus(*numbers[1])
