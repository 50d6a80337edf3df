"""Is sharing what it was promised to be? Pairs are looked at while they last: measure, judge, act, learn.

`Watch.look` takes what nodes have measured of each pair, works out how both jobs stand with their promises, and says
what is to be done: who stands still, who goes back into the queue, who is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.durations import Range, given_done
from slurm_gpushare.helper.observe import View, expectation
from slurm_gpushare.helper.occupancy import token_of
from slurm_gpushare.helper.pair_speeds import PairMeasurements, SeenPair
from slurm_gpushare.helper.pairs import Ledger, Pair, PairChanges
from slurm_gpushare.helper.profile_check import Excess, MemoryWatch, strike, unlike_profile
from slurm_gpushare.helper.promises import (
    RAN_ON,
    Mark,
    PairStatus,
    PauseHistory,
    Pauses,
    PauseStep,
    PromiseStatus,
    mark_paused,
    next_step,
)
from slurm_gpushare.helper.queue_facts import SharingCost, TokenFacts, token_facts
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import UNDER_MPS, UNTOLD_MOST_S
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import BrokenPromise
from slurm_gpushare.store.workloads import Profile

LIMIT_SLACK = 0.05
"""Of its limit, where that cannot be lengthened: so much must be left after a pessimistic end."""
PAUSED = "paused"
"""The feature of a strike for going on in a pause."""
UNTOLD = "somebody uses the card, and nobody can say who or how much of it"


@dataclass(slots=True)
class ToDo:
    """What a look at the pairs wants done, and what it has noted."""

    decisions: list[Decision] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    requeues: list[tuple[Job, Job, str]] = field(default_factory=list)
    """Job, neighbour, why; its owner has said that this may be."""


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the pairs on cards of one model: what is known beside what was measured."""

    profiles: Mapping[str, Profile]
    costs: Mapping[int, SharingCost]
    anew: Collection[str]
    """Tokens that are to be measured anew."""
    view: View
    config: Config

    @property
    def now_s(self) -> float:
        return self.view.now_s


class Watch:
    """Follows the pairs that share."""

    def __init__(self, store: Store, slurm: Slurm, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._measured = PairMeasurements(store)
        self._memory = MemoryWatch(store, slurm)
        self.pauses = Pauses()
        self._entered: set[tuple[int, int]] = set()
        self._told: set[tuple[int, int, int]] = set()

    async def look(self, changes: PairChanges, view: View, config: Config) -> ToDo:
        """Compare, judge, learn; what is to be done about jobs. Store: reads profiles, writes what was measured."""
        now_s, pairs, todo = view.now_s, list(changes.now.values()), ToDo()
        ids = {pair.guest.raw_id for pair in pairs}
        running = {job.raw_id: job for job in view.jobs.values() if job.running}
        self._entered = {entered for entered in self._entered if entered[0] in running}
        self._told = {told for told in self._told if told[2] in running}
        for raw_id in self.pauses.jobs - ids:
            self.pauses.end(raw_id, "its neighbour has gone", now_s)
        for job in self.pauses.look(running, now_s):
            todo.marks.append(self._ran_on(job, now_s))
        jobs = {job.raw_id for pair in pairs for job in (pair.resident, pair.guest)}
        records = self._store.live.of_jobs(jobs) if jobs else {}
        by_model = self._store.profiles.by_model({token for pair in pairs for token in pair.tokens}) if pairs else {}
        for pair in pairs:
            seen = self._measured.take(pair, records, by_model.get(pair.card_model, {}))
            self._ledger.measured(pair.key, seen.rate(pair.resident), seen.rate(pair.guest))
        costs = self._ledger.sharing() if pairs else {}
        anew = self._store.violations.to_measure() if pairs else frozenset()
        for pair in (self._ledger.pairs[pair.key] for pair in pairs if pair.key in self._ledger.pairs):
            seen, profiles = self._measured.of(pair), by_model.get(pair.card_model, {})
            now = _Look(profiles, costs, anew, view, config)
            status = self._status(pair, seen, now)
            self._note_broken(status, now_s)
            decisions, needs = self._memory.look(pair, seen.records, profiles, config, now_s)
            todo.decisions += decisions
            todo.requeues += [(job, other, why) for job, other, why in needs if _may_requeue(job, config)]
            self._keep(status, now, todo)
        self._measured.learn(pairs, now_s)
        todo.decisions += await self._memory.ended(self._measured.finish(changes.ended, now_s), now_s)
        todo.marks += self.pauses.marks(running.values(), now_s)
        return todo

    def measured(self, raw_id: int) -> bool:
        """Whether a running job's rate was measured, not only predicted."""
        return self._measured.has(raw_id)

    def _status(self, pair: Pair, seen: SeenPair, look: _Look) -> PairStatus:
        costs, profiles, now_s = look.costs, look.profiles, look.now_s

        def status(job: Job, rate: float) -> PromiseStatus:
            cost, measured = costs.get(job.raw_id, SharingCost()), seen.rates.get(job.raw_id)
            record = seen.records.get(job.raw_id)
            own_pct = job.tag.max_isd_pct if job.tag else None
            return PromiseStatus(
                promise_pct=look.config.promises.of(guest=cost.joined, own_pct=own_pct),
                run_s=run_range(job, cost.lost_s, _facts(job, profiles), now_s).low_s[0],
                lost_s=cost.lost_s + job.paused_s(now_s),
                shared_s=self._ledger.shared_s(pair.key),
                loss=1.0 - min(1.0, rate),
                error=measured.error if measured else 0.0,
                measured=measured is not None,
                untold=record is not None and record.untold_s >= UNTOLD_MOST_S,
            )

        true = [
            token_of(job) not in look.anew
            and not unlike_profile(seen.records.get(job.raw_id), profiles.get(token_of(job) or ""))
            for job in (pair.resident, pair.guest)
        ]
        return PairStatus(
            pair,
            status(pair.resident, pair.resident_rate),
            status(pair.guest, pair.guest_rate),
            guest_first=true[1] and not true[0],
        )

    def _note_broken(self, status: PairStatus, now_s: float) -> None:
        """Keep the two apart from now on, and enter each broken promise once into the audit trail."""
        pair = status.pair
        for job, by, promise in status.sides:
            if not promise.broken:
                continue
            self._store.sharing.ban(*pair.tokens, now_s)
            if (job.raw_id, by.raw_id) not in self._entered:
                self._entered.add((job.raw_id, by.raw_id))
                entry = BrokenPromise(
                    int(now_s), job.raw_id, job.uid, by.raw_id, by.uid, pair.card.node, pair.card.index,
                    round(promise.promise_pct, 1), round(promise.slowed_pct, 1),
                )  # fmt: skip
                self._store.violations.broke([entry])

    def _ran_on(self, job: Job, now_s: float) -> Mark:
        """Somebody let it go on in its pause: its owner, or who has another job or a login there."""
        self._store.violations.strike([strike(job, None, Excess(PAUSED, 0.0, 0.0), now_s)])
        log.warning(RAN_ON, job=job.key, uid=job.uid)
        return self.pauses.mark_woken(job, "somebody let it go on in its pause", now_s)

    def _keep(self, status: PairStatus, look: _Look, todo: ToDo) -> None:
        """Do what a pair needs now."""
        guest, now_s = status.pair.guest, look.now_s
        paused = guest.raw_id in self.pauses
        if (status.resident.untold or status.guest.untold) and not paused and not status.pair.stands_still:
            self._separate(status.pair, (status.pair.resident, guest), UNTOLD, look, todo)
            if _may_requeue(guest, look.config):
                return
        # Whether a client of MPS goes on unhurt is known only where the site has tried its cards and manages MPS.
        tried = look.config.mps != "off" or not status.pair.gpu_model.endswith(UNDER_MPS)
        can = look.config.on_slowdown == "pause" and tried and self.pauses.can_be_told(guest, now_s)
        if paused or (can and not status.pair.stands_still and guest.state == "RUNNING"):
            step = self._step(status, look)
            if step is PauseStep.PAUSE:
                why = (
                    UNTOLD
                    if status.resident.untold
                    else (
                        f"job {status.pair.resident.key} has lost {status.resident.slowed_pct:.0f} % of its run to it, "
                        f"promised were {status.resident.promise_pct:.0f} %"
                    )
                )
                todo.marks.append(mark_paused(guest, why, now_s, status.pair.resident))
                return
            if step is not PauseStep.LEAVE:
                self.pauses.end(guest.raw_id, step.value, now_s)
                return
        if paused or status.pair.stands_still:
            return
        for job, other, promise in status.sides:
            if promise.broken:
                why = (
                    f"job {job.key} has lost {promise.slowed_pct:.0f} % of its run, "
                    f"promised was {promise.promise_pct:.0f} %"
                )
                self._separate(status.pair, (job, other), why, look, todo)
                return

    def _step(self, status: PairStatus, look: _Look) -> PauseStep:
        ahead_s = 2.0 * look.config.tick_s
        if status.pair.guest.raw_id not in self.pauses and not status.resident.breaks_within(ahead_s):
            return PauseStep.LEAVE
        history = self._history(status, look)
        return next_step(status.resident, status.guest, history, look.now_s, ahead_s, status.guest_first)

    def _separate(self, pair: Pair, whose: tuple[Job, Job], why: str, look: _Look, todo: ToDo) -> None:
        """What pausing cannot mend: requeue who came last if its owner has said that this may be, else tell both.

        `whose` is the job with the broken promise, and its neighbour.
        """
        key = (pair.resident.raw_id, pair.guest.raw_id, whose[0].raw_id)
        if key in self._told:
            return
        self._told.add(key)
        log.info("slowdown", gpu=pair.card, resident=pair.resident.key, guest=pair.guest.key, why=why)
        todo.decisions += explain.both(*whose, "slowed", look.now_s, why)
        if _may_requeue(pair.guest, look.config):
            todo.requeues.append((pair.guest, pair.resident, why))

    def _history(self, status: PairStatus, look: _Look) -> PauseHistory:
        job, now_s, view = status.pair.guest, look.now_s, look.view
        paused_s, lost_s = job.paused_s(now_s), status.guest.lost_s
        limit_s = None if job.limit_s is None else job.limit_s - job.given_s
        moves_s = math.inf
        if job.end_s is not None and job.limit_s is not None:
            high_s = float(run_range(job, lost_s - paused_s, _facts(job, look.profiles), now_s).high_s[0])
            moves_s = (1.0 - LIMIT_SLACK) * job.limit_s - high_s - lost_s
            if look.config.extend_time_limit:
                moves_s = max(moves_s, min(view.free_until_s(job) - job.end_s, _may_grow_s(job, view)))
        return PauseHistory(
            since_s=self.pauses.since_s(job.raw_id),
            total_s=paused_s,
            ran_s=self.pauses.ran_s(job.raw_id, now_s),
            most_s=look.config.pause_most_pct / 100.0 * max(status.guest.run_s, limit_s or 0.0),
            end_moves_s=moves_s,
        )


def _may_grow_s(job: Job, view: View) -> float:
    """How much its time limit may be lengthened before it is longer than one of its partitions allows."""
    found = (occupant for gpu in view.snapshot.gpus if gpu.node in job.nodes for occupant in gpu.occupants)
    return next((occupant.workload.may_grow_s for occupant in found if occupant.key == job.key), math.inf)


def _may_requeue(job: Job, config: Config) -> bool:
    """Whether its owner has said so; Slurm's own default is no consent."""
    return config.on_slowdown != "report" and job.tag is not None and job.tag.requeue and job.requeue


def _facts(job: Job, profiles: Mapping[str, Profile]) -> TokenFacts:
    profile = profiles.get(token_of(job) or "")
    return token_facts(profile) if profile else TokenFacts()


def run_range(job: Job, lost_s: float, facts: TokenFacts, now_s: float) -> Range:
    """Alone-time of a running job's whole run: if that is short, at least what it has done, and if it is long."""
    elapsed_s = max(0.0, now_s - (job.start_s or now_s) - job.paused_s(now_s))
    limit_s = math.inf if job.limit_s is None else job.limit_s - job.given_s
    expected = expectation(job, facts)
    numbers = (expected.middle_s, expected.spread, limit_s, max(0.0, elapsed_s - lost_s))
    return given_done(*(np.array([number]) for number in numbers))
