"""Acting on a promise that is about to be broken: pause, separate where the owner consents, else say so.

`judging` says how a job stands, `pausing` what follows from it; this module knows Slurm.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.apply import Applied, Outcome
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import startable, token_of
from slurm_gpushare.helper.pairs import Pair
from slurm_gpushare.helper.pauses import LONGEST_PAUSE_S, ForgottenPauses, loses_its_cpus, pause, resume
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job

WAIT_FOR_CORES_S = 60.0
"""A job that may go on waits so long for its cores, if others have them; then it shares them."""
REFUSALS = 3
"""Slurm may refuse to suspend one job for reasons of that job's. So many jobs in a row: it suspends nobody here."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair and how both stand."""

    pair: Pair
    resident: Standing
    guest: Standing
    guest_first: bool
    """The resident is not what its profile says, and the guest is."""

    @property
    def standings(self) -> tuple[Standing, Standing]:
        """In the order of the pair's sides."""
        return self.resident, self.guest


class Keeper:
    """Keeps residents' promises, one look after the other."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._resumed_s: dict[int, float] = {}
        self._may_go_on_s: dict[int, float] = {}
        """Since when jobs that wait for their cores have been free to go on."""
        self._told: set[tuple[int, int, str]] = set()
        self.forgotten = ForgottenPauses(slurm)
        self.ran_on: Collection[int] = ()
        """Jobs that were at work in a pause of ours: they are not paused any more."""
        self.preemption_suspends = False
        """Whether Slurm suspends jobs here for reasons of its own: then we do not."""
        self.may_pause = True
        """Whether Slurm has not refused it again and again."""
        self._refused: set[int] = set()
        """Jobs that Slurm would not suspend, since it last suspended one: they are not tried again."""

    def tidy(self, view: View, keep: set[int]) -> list[Decision]:
        """Let go on whom we paused and nobody needs to be paused any more: its neighbour ended, or we started anew.

        A mark without a pause goes too: somebody else has resumed the job.
        """
        decisions: list[Decision] = []
        again = self.forgotten.pause_again(view.jobs.values(), view.now_s)
        for job in view.jobs.values():
            if job.tag is None or job.tag.paused is None or job.raw_id in again:
                continue
            if job.raw_id in self.ran_on:
                decisions += self._resume(job, view.now_s, "it went on by itself", at_once=True)
            elif job.raw_id not in keep or not job.paused:
                decisions += self._resume(job, view.now_s, "nothing keeps it back any more")
        self._resumed_s = {job: at_s for job, at_s in self._resumed_s.items() if view.now_s - at_s < 2 * REST_S}
        paused = {job.raw_id for job in view.jobs.values() if job.paused}
        self._may_go_on_s = {job: at_s for job, at_s in self._may_go_on_s.items() if job in paused}
        return decisions

    def keep(self, judged: Judged, view: View, config: Config) -> list[Decision]:
        """Do what a pair needs now; returns what was decided."""
        pair, now_s = judged.pair, view.now_s
        ahead_s = 2.0 * config.tick_s
        wanted = config.on_slowdown == "pause" and not self.preemption_suspends
        may_pause = wanted and self.may_pause and pair.guest.raw_id not in self._refused
        may_change = (may_pause or pair.guest.paused) and pair.guest.raw_id not in self.ran_on
        if may_change and not (pair.stands_still and not pair.guest.paused):
            pauses = self._pauses(pair.guest, judged.guest, view, config)
            step = next_step(judged.resident, judged.guest, pauses, now_s, ahead_s, judged.guest_first)
            if step is PauseStep.PAUSE:
                return self._pause(judged, view, config)
            if step is PauseStep.RESUME:
                return self._resume(pair.guest, now_s, "its neighbour has budget again")
            if step is PauseStep.END:
                return self._resume(pair.guest, now_s, "it was paused long enough", at_once=True)
        if pair.stands_still:
            return []
        for (job, other), standing in zip(pair.sides, judged.standings, strict=True):
            if standing.broken:
                why = (
                    f"job {job.key} has lost {standing.slowed_pct:.0f} % of its run, "
                    f"promised was {standing.promise_pct:.0f} %"
                )
                return self.separate(judged, (job, other), why, now_s, config)
        return []

    def separate(
        self, judged: Judged, whose: tuple[Job, Job], why: str, now_s: float, config: Config
    ) -> list[Decision]:
        """What pausing cannot mend: requeue who came last if its owner has said that this may be, else tell both.

        `whose` is the job with the broken promise, and its neighbour.
        """
        pair = judged.pair
        key = (pair.resident.raw_id, pair.guest.raw_id, why.split()[0])
        if key in self._told:
            return []
        self._told.add(key)
        log.warning("slowdown", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key, why=why)
        told = explain.both(*whose, "slowed", now_s, why)
        return told + self.requeue(pair.guest, pair.resident, why, now_s, config)

    def requeue(self, job: Job, other: Job, why: str, now_s: float, config: Config) -> list[Decision]:
        """Put a job back into the queue, if its owner has said so; Slurm's own default is no consent."""
        if config.on_slowdown == "report" or job.tag is None or not (job.tag.requeue and job.requeue):
            return []
        try:
            self._slurm.requeue(job.key)
        except SlurmError as error:
            log.warning("requeue", job=job.key, message=error.what)
            return []
        log.info("requeue", job=job.key, why=why)
        return [explain.noted(job, "requeued", now_s, other, why=why)]

    def _pauses(self, job: Job, standing: Standing, view: View, config: Config) -> Pauses:
        limit_s = None if job.limit_s is None else job.limit_s - job.given_s
        run_s = max(standing.run_s, limit_s or 0.0)
        moves_s = view.free_until_s(job) - job.end_s if job.end_s is not None and limit_s is not None else float("inf")
        return Pauses(
            since_s=float(job.tag.paused.since_s) if job.tag and job.tag.paused else None,
            total_s=job.paused_s(view.now_s),
            ran_s=view.now_s - self._resumed_s.get(job.raw_id, float("-inf")),
            most_s=config.pause_most_pct / 100.0 * run_s,
            end_moves_s=moves_s,
        )

    def _pause(self, judged: Judged, view: View, config: Config) -> list[Decision]:
        pair, job = judged.pair, judged.pair.guest
        node = view.nodes.get(job.nodes[0]) if job.nodes else None
        waiting = [other for other in view.jobs.values() if token_of(other) is None and startable(other, view.now_s)]
        by_signal = node is None or loses_its_cpus(job, node, _running(view), waiting)
        if by_signal and not config.extend_time_limit:
            return []  # its clock would run on, and nobody would give the time back
        applied = pause(self._slurm, job, view.now_s, by_signal=by_signal)
        why = (
            f"job {pair.resident.key} has lost {judged.resident.slowed_pct:.0f} % of its run to it, "
            f"promised were {judged.resident.promise_pct:.0f} %"
        )
        self._log("pause", applied, by="signal" if by_signal else "suspend", why=why)
        if not by_signal:
            self._count_refusals(job, applied.outcome)
        if applied.outcome is not Outcome.DONE:
            return []
        self.forgotten.paused(job, view.now_s)
        return [explain.noted(job, "paused", view.now_s, pair.resident, why=why)]

    def _count_refusals(self, job: Job, outcome: Outcome) -> None:
        """Stop pausing where Slurm suspends nobody: one refusal may be about one job alone."""
        if outcome is Outcome.DONE:
            self._refused.clear()
        elif outcome is Outcome.REFUSED:
            self._refused.add(job.raw_id)
            if len(self._refused) >= REFUSALS:
                self.may_pause = False
                log.warning("pause", error="Slurm refuses to suspend: promises are only watched from now on")

    def _resume(self, job: Job, now_s: float, why: str, *, at_once: bool = False) -> list[Decision]:
        if not self.forgotten.may_end(job, now_s):
            return []  # the next look does it
        since_s = self._may_go_on_s.setdefault(job.raw_id, now_s)
        patient = not at_once and now_s - since_s < WAIT_FOR_CORES_S
        applied = resume(self._slurm, job, now_s, patient=patient, stood_still=job.raw_id not in self.ran_on)
        self._log("resume", applied, why=why)
        if applied.outcome is Outcome.WAITS:
            key = (job.raw_id, job.raw_id, "cpus")
            told, self._told = key in self._told, self._told | {key}
            return [] if told else [explain.noted(job, "resume-waits", now_s, why=applied.message)]
        del self._may_go_on_s[job.raw_id]
        if applied.outcome is not Outcome.DONE:
            return []
        self._resumed_s[job.raw_id] = now_s
        self.forgotten.resumed(job)
        return [explain.noted(job, "resumed", now_s, why=why)] if job.paused else []

    def _log(self, event: str, applied: Applied, **fields: object) -> None:
        tell = log.warning if applied.outcome is Outcome.REFUSED else log.info
        tell(event, job=applied.key, outcome=applied.outcome, **fields, message=applied.message or None)


def _running(view: View) -> list[Job]:
    return [job for job in view.jobs.values() if job.running]


# Whether sharing is what was promised: a pure judgement of what was measured, over the run as it is.


SURE = 1.645
"""Standard deviations: 95 % sure that it is no better than this."""
NEARLY_SURE = 0.75
"""Of a promise that is about to be broken, so much must have been lost for sure before anything is done."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands with its promise."""

    promise_pct: float
    run_s: float
    """Alone-time of its whole run if that is short, and at least what it has done."""
    lost_s: float = 0.0
    """To neighbours and to pauses."""
    shared_s: float = 0.0
    """Of its run, the time beside its present neighbour."""
    loss: float = 0.0
    """What each second beside its present neighbour costs it, as measured."""
    error: float = 0.0
    """How far that may be off (one standard deviation)."""
    measured: bool = True

    @property
    def promised_s(self) -> float:
        return self.promise_pct / 100.0 * self.run_s

    @property
    def budget_s(self) -> float:
        """Delay that the promise still leaves."""
        return self.promised_s - self.lost_s

    @property
    def slowed_pct(self) -> float:
        """Of its run."""
        return 100.0 * self.lost_s / self.run_s if self.run_s > 0 else 0.0

    @property
    def _surely_lost_s(self) -> float:
        return self.lost_s - SURE * self.error * self.shared_s

    @property
    def broken(self) -> bool:
        """Whether its promise is broken, beyond reasonable doubt."""
        return self.measured and self._surely_lost_s > self.promised_s

    def breaks_within(self, ahead_s: float) -> bool:
        """Whether its promise is about to be broken if both go on for `ahead_s`."""
        near = self.budget_s <= self.loss * ahead_s and self.loss > SURE * self.error
        return self.measured and near and self._surely_lost_s >= NEARLY_SURE * self.promised_s - self.loss * ahead_s

    def affords(self, ahead_s: float) -> bool:
        """Whether both could go on for `ahead_s` within its promise."""
        return self.budget_s >= self.loss * ahead_s


# When the one that came last is paused, and when it goes on: a pure decision, for helper and simulator alike.


REST_S = 20.0
"""Between two pauses a job runs for at least so long."""


class PauseStep(StrEnum):
    """What to do about a pair."""

    LEAVE = "leave"
    PAUSE = "pause"
    RESUME = "resume"
    """As soon as its cores are free: it may wait for them for a while."""
    END = "end"
    """At once: it was paused for as long as may be."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """What the one that came last has been through, and how much of it there may be."""

    since_s: float | None = None
    """When the present pause began; None: it runs."""
    total_s: float = 0.0
    """Paused in all, the present pause included."""
    ran_s: float = math.inf
    """How long it has run since the last pause."""
    most_s: float = math.inf
    """``PauseMost`` of its run or limit."""
    end_moves_s: float = math.inf
    """How far its end may still move before it meets a reservation."""

    @property
    def room_s(self) -> float:
        return min(self.most_s - self.total_s, self.end_moves_s)


def next_step(
    resident: Standing, guest: Standing, pauses: Pauses, now_s: float, ahead_s: float, guest_first: bool = False
) -> PauseStep:
    """Pause the guest while the resident has no budget; `ahead_s` is how long it takes until the next look.

    `guest_first`: the resident is not what its profile says and the guest is, so the guest's promise comes first: it
    is paused only as long as its own budget lasts.
    """
    room_s = min(pauses.room_s, guest.budget_s) if guest_first else pauses.room_s
    if pauses.since_s is None:
        can = pauses.ran_s >= REST_S and room_s > ahead_s
        return PauseStep.PAUSE if can and resident.breaks_within(ahead_s) else PauseStep.LEAVE
    if now_s - pauses.since_s + ahead_s > LONGEST_PAUSE_S or room_s <= ahead_s:
        return PauseStep.END
    return PauseStep.RESUME if resident.affords(REST_S) else PauseStep.LEAVE
