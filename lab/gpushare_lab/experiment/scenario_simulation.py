"""The scenarios without Slurm: the true rates of the emulated jobs, and the helper's own judgement and decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gpushare_lab.experiment.scenarios import Actor, Scenario, ScenarioOutcome, ScenarioResult, begun
from slurm_gpushare.helper.durations import expect, given_done
from slurm_gpushare.helper.promises import PauseHistory, PauseStep, PromiseStatus, next_step

TICK_S = 1.0
ALONE_S = 8.0
"""The resident has so much of its run to itself."""
MEASURED_AFTER_S = 8.0
"""So long together, and both rates are measured."""
ERROR = 0.05
PAUSE_MOST = 0.25
DEAD_S = 25.0
"""Of a helper that was killed: the watchdog lets jobs go on, and its unit starts it again."""


@dataclass(slots=True)
class _Job:
    actor: Actor
    outcome: ScenarioOutcome
    rate: float
    start_s: float = 0.0
    done_s: float = 0.0
    lost_s: float = 0.0
    shared_s: float = 0.0
    paused_s: float = 0.0
    end_s: float | None = None

    def standing(self, measured: bool) -> PromiseStatus:
        actor, limit_s = self.actor, 60.0 * self.actor.limit_min
        expected = expect(actor.known_s, None, 1, limit_s)
        low_s = float(given_done(*(np.array([x]) for x in (*expected, limit_s, self.done_s))).low_s[0])
        return PromiseStatus(
            self.outcome.promised_pct, low_s, self.lost_s + self.paused_s, self.shared_s, 1.0 - self.rate,
            ERROR * self.rate, measured,
        )  # fmt: skip

    def advance(self, rate: float, now_s: float) -> None:
        """One tick at `rate`; 0: it stands still."""
        if self.end_s is not None:
            return
        self.done_s += rate * TICK_S
        if self.done_s >= self.actor.work_s:
            self.end_s = now_s + TICK_S - (self.done_s - self.actor.work_s) / max(rate, 1e-9)

    def finish(self) -> None:
        assert self.end_s is not None
        self.outcome.measured_pct = 100.0 * ((self.end_s - self.start_s) / self.actor.work_s - 1.0)
        self.outcome.state = "COMPLETED"


def simulate(scenario: Scenario) -> ScenarioResult:
    """One scenario, tick by tick. Where the helper is killed the watchdog lets the guest go on."""
    result = begun(scenario)
    resident_rate, guest_rate = scenario.rates()
    resident = _Job(scenario.resident, result.resident, resident_rate)
    guest = _Job(scenario.guest, result.guest, guest_rate, start_s=ALONE_S)
    paused_at: float | None = None
    resumed_at = -math.inf
    dead_until_s, now_s = 0.0, 0.0
    while resident.end_s is None or guest.end_s is None:
        here = now_s >= ALONE_S and guest.end_s is None
        both = here and resident.end_s is None and paused_at is None
        alive = now_s >= dead_until_s
        if alive and here and resident.end_s is None:
            step = _step(resident, guest, paused_at, resumed_at, now_s)
            if step is PauseStep.PAUSE:
                paused_at, both = now_s, False
                _note(result, "paused")
                if scenario.during_pause == "kill" and not dead_until_s:
                    dead_until_s, alive = now_s + DEAD_S, False
        if paused_at is not None and (
            not alive or resident.end_s is not None or _goes_on(resident, guest, paused_at, now_s)
        ):
            paused_at, resumed_at = None, now_s
            _note(result, "resumed" if alive else "resumed by the watchdog")
        for job in (resident, guest):
            job.shared_s += TICK_S if both else 0.0
            job.lost_s += TICK_S * (1.0 - job.rate) if both else 0.0
        resident.advance(resident.rate if both else 1.0, now_s)
        if paused_at is not None:
            guest.paused_s += TICK_S
        elif here:
            guest.advance(guest.rate if both else 1.0, now_s)
        if here and scenario.guest.grows_mib and guest.done_s >= scenario.guest.work_s / 2:
            _note(result, "outgrown")
        now_s += TICK_S
    for job in (resident, guest):
        job.finish()
        if (job.end_s or 0.0) - job.start_s - job.paused_s > 60.0 * job.actor.limit_min:
            _note(result, "extended")
    return result


def _step(resident: _Job, guest: _Job, paused_at: float | None, resumed_at: float, now_s: float) -> PauseStep:
    measured = resident.shared_s >= MEASURED_AFTER_S
    pauses = PauseHistory(paused_at, guest.paused_s, now_s - resumed_at, PAUSE_MOST * 60.0 * guest.actor.limit_min)
    return next_step(
        resident.standing(measured),
        guest.standing(measured),
        pauses,
        now_s,
        2 * TICK_S,
        guest_first=guest.actor.honest and not resident.actor.honest,
    )


def _goes_on(resident: _Job, guest: _Job, paused_at: float, now_s: float) -> bool:
    return _step(resident, guest, paused_at, -math.inf, now_s) in (PauseStep.RESUME, PauseStep.END)


def _note(result: ScenarioResult, action: str) -> None:
    if action not in result.actions:
        result.actions.append(action)
