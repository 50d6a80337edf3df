"""Acting on a promise that is about to be broken: pause, separate where the owner consents, else say so.

`judging` says how a job stands, `pausing` what follows from it; this module knows Slurm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slurm_gpushare.config import Config
from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.acting import explain
from slurm_gpushare.coschedule.acting.apply import Applied, Outcome
from slurm_gpushare.coschedule.acting.pauses import loses_its_cpus, pause, resume
from slurm_gpushare.coschedule.pairs.forgotten_pauses import ForgottenPauses
from slurm_gpushare.coschedule.pairs.judging import Standing
from slurm_gpushare.coschedule.pairs.ledger import Pair
from slurm_gpushare.coschedule.pairs.pausing import REST_S, Pauses, PauseStep, next_step
from slurm_gpushare.coschedule.view.observe import View
from slurm_gpushare.coschedule.view.taking_part import startable, token_of
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.decisions import Decision

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

    def __init__(self, config: Config, slurm: Slurm) -> None:
        self._config = config
        self._slurm = slurm
        self._resumed_s: dict[int, float] = {}
        self._may_go_on_s: dict[int, float] = {}
        """Since when jobs that wait for their cores have been free to go on."""
        self._told: set[tuple[int, int, str]] = set()
        self.forgotten = ForgottenPauses(slurm)
        self.ran_on: Collection[int] = ()
        """Jobs that were at work in a pause of ours: they are not paused any more."""
        self.may_pause = config.on_slowdown == "pause"
        """Whether pausing is wanted and possible here."""
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

    def keep(self, judged: Judged, view: View) -> list[Decision]:
        """Do what a pair needs now; returns what was decided."""
        pair, now_s = judged.pair, view.now_s
        ahead_s = 2.0 * self._config.tick_s
        may_pause = self.may_pause and pair.guest.raw_id not in self._refused
        may_change = (may_pause or pair.guest.paused) and pair.guest.raw_id not in self.ran_on
        if may_change and not (pair.stands_still and not pair.guest.paused):
            pauses = self._pauses(pair.guest, judged.guest, view)
            step = next_step(judged.resident, judged.guest, pauses, now_s, ahead_s, judged.guest_first)
            if step is PauseStep.PAUSE:
                return self._pause(judged, view)
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
                return self.separate(pair, job, other, why, now_s)
        return []

    def separate(self, pair: Pair, job: Job, other: Job, why: str, now_s: float) -> list[Decision]:
        """What pausing cannot mend: requeue who came last if its owner has said that this may be, else tell both."""
        key = (pair.resident.raw_id, pair.guest.raw_id, why.split()[0])
        if key in self._told:
            return []
        self._told.add(key)
        log.warning("slowdown", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key, why=why)
        told = explain.both(job, other, "slowed", now_s, why)
        return told + self.requeue(pair.guest, pair.resident, why, now_s)

    def requeue(self, job: Job, other: Job, why: str, now_s: float) -> list[Decision]:
        """Put a job back into the queue, if its owner has said so; Slurm's own default is no consent."""
        if self._config.on_slowdown == "report" or job.tag is None or not (job.tag.requeue and job.requeue):
            return []
        try:
            self._slurm.requeue(job.key)
        except SlurmError as error:
            log.warning("requeue", job=job.key, message=error.what)
            return []
        log.info("requeue", job=job.key, why=why)
        return [explain.noted(job, "requeued", now_s, other, why=why)]

    def _pauses(self, job: Job, standing: Standing, view: View) -> Pauses:
        limit_s = None if job.limit_s is None else job.limit_s - job.given_s
        run_s = max(standing.run_s, limit_s or 0.0)
        moves_s = view.free_until_s(job) - job.end_s if job.end_s is not None and limit_s is not None else float("inf")
        return Pauses(
            since_s=float(job.tag.paused.since_s) if job.tag and job.tag.paused else None,
            total_s=job.paused_s(view.now_s),
            ran_s=view.now_s - self._resumed_s.get(job.raw_id, float("-inf")),
            most_s=self._config.pause_most_pct / 100.0 * run_s,
            end_moves_s=moves_s,
        )

    def _pause(self, judged: Judged, view: View) -> list[Decision]:
        pair, job = judged.pair, judged.pair.guest
        node = view.nodes.get(job.nodes[0]) if job.nodes else None
        waiting = [other for other in view.jobs.values() if token_of(other) is None and startable(other, view.now_s)]
        by_signal = node is None or loses_its_cpus(job, node, _running(view), waiting)
        if by_signal and not self._config.extend_time_limit:
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
