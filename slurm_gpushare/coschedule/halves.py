"""From the snapshot's dataclasses to the arrays on which second halves are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.coschedule.constraints import Bools, Floats, Ints, Sites
from slurm_gpushare.coschedule.expect import budget_s, left_s
from slurm_gpushare.coschedule.lanes import Lanes, Rates, Terms, Waiting, at_worst
from slurm_gpushare.coschedule.settings import PolicySettings
from slurm_gpushare.coschedule.snapshot import DurationSource, Gpu, Occupant, PendingJob
from slurm_gpushare.knowledge.rates import Knowledge


def expected_s(job: PendingJob | Occupant, limit_use: float) -> float:
    """How long the job is expected to run alone."""
    return limit_use * job.expected_s if job.expected_source is DurationSource.LIMIT else job.expected_s


@dataclass(frozen=True, slots=True)
class Resident:
    """A sharer with room beside it, on GPU number `gpu` of the snapshot."""

    gpu: int
    job: Occupant


def has_room_beside(gpu: Gpu) -> bool:
    """Whether somebody may join the one sharer on this card."""
    return (
        gpu.usable
        and not gpu.exclusive_process
        and len(gpu.occupants) == 1
        and gpu.occupants[0].token is not None
        and not gpu.occupants[0].whole
    )


def as_occupant(job: PendingJob) -> Occupant:
    """A pending job as it will be on the card that the plan gives it."""
    return Occupant(
        job_id=job.job_id,
        token=job.token,
        cluster=job.cluster,
        user=job.user,
        account=job.account,
        mem_used_mib=job.mem_used_mib,
        limit_s=job.limit_s,
        expected_s=job.expected_s,
        expected_source=job.expected_source,
        max_isd_pct=job.max_isd_pct,
    )


@dataclass(frozen=True, slots=True)
class Running:
    """Where running jobs stand, by column."""

    done_s: Floats  # alone-time behind them
    lost_s: Floats
    left_s: Floats  # alone-time before them
    limit_left_s: Floats

    @classmethod
    def of(cls, jobs: Sequence[Occupant], now_s: float, settings: PolicySettings) -> Running:
        elapsed = np.array([0.0 if job.start_s is None else max(now_s - job.start_s, 0.0) for job in jobs], float)
        lost = np.minimum(np.array([job.lost_s for job in jobs], float), elapsed)
        limit_left = np.array([job.limit_s for job in jobs], float) - elapsed
        if settings.extend_time_limit:
            limit_left = limit_left + lost
        expected = np.array([expected_s(job, settings.limit_use) for job in jobs], float)
        only_limit = np.array([job.expected_source is DurationSource.LIMIT for job in jobs], bool)
        left = left_s(expected, only_limit, elapsed - lost, limit_left, settings.limit_use)
        return cls(elapsed - lost, lost, np.maximum(left, 0.0), limit_left)


def lanes_of(
    residents: Sequence[Resident], running: Running, kind: Ints, wanted_rank: Ints, settings: PolicySettings
) -> Lanes:
    """The residents as lanes."""
    promise = [promise_pct(resident.job, settings) for resident in residents]
    return Lanes(
        kind=kind,
        budget_s=budget_s(running.done_s + running.left_s, running.done_s, running.lost_s, np.array(promise, float)),
        left_s=running.left_s,
        limit_left_s=running.limit_left_s,
        wanted_rank=wanted_rank,
    )


def promise_pct(job: Occupant, settings: PolicySettings) -> float:
    """Most that neighbours may lengthen its run: a former guest, alone by now, stays under the guest's promise."""
    promise = settings.guest_cap_pct if job.joined else settings.resident_budget_pct
    return promise if job.max_isd_pct is None else min(promise, job.max_isd_pct)


def waiting_of(jobs: Sequence[PendingJob], rank: Ints, kind: Ints, settings: PolicySettings) -> Waiting:
    """The pending jobs as candidates for a lane."""
    cap = settings.guest_cap_pct
    own = [cap if job.max_isd_pct is None else min(cap, job.max_isd_pct) for job in jobs]
    return Waiting(
        rank=rank,
        kind=kind,
        expected_s=np.array([expected_s(job, settings.limit_use) for job in jobs], float),
        limit_s=np.array([job.limit_s for job in jobs], float),
        cap_pct=np.array(own, float) if any(pct < cap for pct in own) else None,
    )


def terms_between(
    guests: Sequence[str],
    residents: Sequence[str],
    knowledge: Knowledge,
    never_together: frozenset[tuple[str, str]],
    settings: PolicySettings,
) -> Terms:
    """The terms between these tokens."""
    forward, backward = knowledge.rates(guests, residents), knowledge.rates(residents, guests)
    can_share = np.ones(forward.mean.shape, bool)
    if never_together:
        column = {token: j for j, token in enumerate(residents)}
        row = {token: i for i, token in enumerate(guests)}
        for one, other in never_together:
            for guest, resident in ((one, other), (other, one)):
                if guest in row and resident in column:
                    can_share[row[guest], column[resident]] = False
    return Terms(Rates(forward.mean, forward.low, backward.mean.T, backward.low.T, can_share), settings)


class Compatible:
    """All that must fit between a guest and a resident besides rates and priority."""

    def __init__(
        self,
        sites: Sites,
        jobs: Sequence[PendingJob],
        waiting: Waiting,
        residents: Sequence[Resident],
        running: Running,
        lanes: Lanes,
        terms: Terms,
        settings: PolicySettings,
    ) -> None:
        self.sites, self.jobs, self.waiting = sites, jobs, waiting
        self.residents, self.running, self.lanes, self.terms, self.settings = residents, running, lanes, terms, settings
        self.gpus = np.array([resident.gpu for resident in residents], np.int64)
        keep = 1.0 - settings.memory_headroom_pct / 100.0
        cards = [sites.gpus[resident.gpu] for resident in residents]
        self.free_mib = np.array(  # a job without a profile might need anything
            [
                card.mem_total_mib * keep - r.job.mem_used_mib if r.job.mem_used_mib is not None else -1.0
                for card, r in zip(cards, residents, strict=True)
            ],
            float,
        )

    def __call__(self, guests: Ints, columns: Ints) -> Bools:
        ok = self._fits(guests, columns)
        return ok if self.settings.extend_time_limit else ok & self._within_limits(guests, columns)

    def to_succeed(self, guests: Ints, columns: Ints) -> Bools:
        """The same where the newcomer outlasts who is there."""
        ok = self._fits(guests, columns)
        if self.settings.extend_time_limit:
            return ok
        cell = np.ix_(self.waiting.kind[guests], self.lanes.kind[columns])
        shared_s, lost_s = at_worst(self.running.left_s[columns], self.terms, cell)
        margin = 1.0 - self.settings.limit_margin_pct / 100.0
        d, limit_s = self.waiting.expected_s[guests][:, None], self.waiting.limit_s[guests][:, None]
        ok &= (d + lost_s <= margin * limit_s) & (shared_s <= margin * self.running.limit_left_s[columns])
        return ok

    def may_use(self, guests: Ints, columns: Ints) -> Bools:
        """Whose cards they could have whole."""
        return np.stack([self.sites.allowed(self.jobs[i])[self.gpus[columns]] for i in guests.tolist()])

    def _fits(self, guests: Ints, columns: Ints) -> Bools:
        jobs = [self.jobs[i] for i in guests.tolist()]
        need = [np.inf if job.mem_used_mib is None else job.mem_used_mib for job in jobs]
        ok: Bools = np.array(need, float)[:, None] <= self.free_mib[columns]
        ok &= self.sites.room_for(jobs, self.gpus[columns])
        if self.settings.share_across != "any":
            who = self.settings.share_across
            ours = np.array([getattr(job, who) for job in jobs], object)
            theirs = np.array([getattr(self.residents[j].job, who) for j in columns.tolist()], object)
            ok &= ours[:, None] == theirs
        return ok

    def _within_limits(self, guests: Ints, columns: Ints) -> Bools:
        """Whether both would still end before their time limits if the rates were at their worst."""
        cell = np.ix_(self.waiting.kind[guests], self.lanes.kind[columns])
        d = self.waiting.expected_s[guests][:, None]
        margin = 1.0 - self.settings.limit_margin_pct / 100.0
        guest_ends = d * self.terms.stay_high[cell]
        left = self.running.left_s[columns]
        resident_ends = left + np.minimum(d * self.terms.delay_high[cell], left * self.terms.to_the_end[cell])
        ok: Bools = guest_ends <= margin * self.waiting.limit_s[guests][:, None]
        ok &= resident_ends <= margin * self.running.limit_left_s[columns]
        return ok
