"""From the snapshot's dataclasses to the arrays on which second halves are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_gpushare.helper.durations import Ahead, Range, given_done
from slurm_gpushare.helper.guests import Candidates, PairRates, Residents, Terms, at_worst
from slurm_gpushare.helper.snapshot import Gpu, Occupant, PendingJob, Snapshot
from slurm_gpushare.helper.whole_gpus import Bools, Floats, Ints, Sites
from slurm_gpushare.knowledge.rates import Knowledge
from slurm_gpushare.protocol.policy import PolicySettings


@dataclass(frozen=True, slots=True)
class OpenResident:
    """A sharer with room beside it, on GPU number `gpu` of the snapshot."""

    gpu: int
    job: Occupant


def has_room_beside(gpu: Gpu) -> bool:
    """Whether somebody may join the one sharer on this card. Nobody with a single card joins a gang."""
    return _has_room(gpu) and not gpu.occupants[0].gang


def open_gangs(gpus: Sequence[Gpu]) -> list[OpenResident]:
    """Gangs that have a node to themselves, so that another may join them; each at its first card."""
    nodes: dict[str, list[int]] = {}
    for at, gpu in enumerate(gpus):
        nodes.setdefault(gpu.node, []).append(at)
    found = []
    for cards in nodes.values():
        first = gpus[cards[0]].occupants[:1]
        if first and first[0].gang and all(gpus[at].occupants == first and _has_room(gpus[at]) for at in cards):
            found.append(OpenResident(cards[0], first[0]))
    return found


def single_pairs(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The cards that two jobs share which have just that card."""
    return [gpu for gpu in gpus if gpu.usable and len(gpu.occupants) > 1 and not gpu.occupants[0].gang]


def gang_pairs(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The first cards of nodes that two gangs share."""
    firsts = {gpu.node: gpu for gpu in reversed(gpus)}
    return [gpu for gpu in firsts.values() if len(gpu.occupants) > 1 and all(job.gang for job in gpu.occupants)]


def _has_room(gpu: Gpu) -> bool:
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
        key=job.key,
        token=job.token,
        cluster=job.cluster,
        user=job.user,
        account=job.account,
        mem_used_mib=job.mem_used_mib,
        limit_s=job.limit_s,
        may_grow_s=job.may_grow_s,
        expected_s=job.expected_s,
        expected_spread=job.expected_spread,
        max_isd_pct=job.max_isd_pct,
        gang=job.gang,
    )


@dataclass(frozen=True, slots=True)
class Running:
    """Where running jobs stand, by column."""

    ahead: Ahead
    lost_s: Floats
    limit_left_s: Floats
    may_grow_s: Floats  # how much more may be added to their limits

    @property
    def done_s(self) -> Floats:
        """Alone-time behind them."""
        return self.ahead.done_s

    @property
    def left(self) -> Range:
        """Alone-time before them."""
        return self.ahead.left

    @classmethod
    def of(cls, jobs: Sequence[Occupant], now_s: float, settings: PolicySettings) -> Running:
        def column(values: Iterable[float]) -> Floats:
            return np.fromiter(values, float, len(jobs))

        elapsed = column(0.0 if job.start_s is None else max(now_s - job.start_s - job.paused_s, 0.0) for job in jobs)
        lost = np.minimum(column(job.lost_s for job in jobs), elapsed)
        limit, given = column(job.limit_s for job in jobs), column(job.given_s for job in jobs)
        limit_left = limit - elapsed
        if settings.extend_time_limit:
            limit_left = limit_left + np.maximum(lost - given, 0.0)
        middle, spread = column(job.expected_s for job in jobs), column(job.expected_spread for job in jobs)
        ahead = Ahead.of(middle, spread, limit - given, elapsed - lost)
        return cls(ahead, lost, limit_left, column(job.may_grow_s for job in jobs))


def residents_of(
    residents: Sequence[OpenResident], running: Running, kind: Ints, wanted_rank: Ints, settings: PolicySettings
) -> Residents:
    """The residents as lanes."""
    jobs = [resident.job for resident in residents]
    promises = settings.promises
    promise = np.array([promises.of(guest=job.joined, own_pct=job.max_isd_pct) for job in jobs], float)
    return Residents(
        kind=kind,
        budget_s=running.ahead.budget_s(promise, running.lost_s),
        bears=running.ahead.bears(promise, running.lost_s),
        left_s=running.left.middle_s,
        left_high_s=running.left.high_s,
        limit_left_s=running.limit_left_s,
        wanted_rank=wanted_rank,
    )


def residents_by_model(snapshot: Snapshot, residents: Sequence[OpenResident]) -> dict[str, list[OpenResident]]:
    """The open residents of each GPU model: nobody is matched across models."""
    found: dict[str, list[OpenResident]] = {}
    for resident in residents:
        found.setdefault(snapshot.gpus[resident.gpu].model, []).append(resident)
    return found


def candidates_of(
    jobs: Sequence[PendingJob], rank: Ints, kind: Ints, now_s: float, settings: PolicySettings
) -> Candidates:
    """The pending jobs as candidates for a lane."""
    own = [np.inf if job.max_isd_pct is None else job.max_isd_pct for job in jobs]
    middle, spread = (np.array(v, float) for v in zip(*((j.expected_s, j.expected_spread) for j in jobs), strict=True))
    limit_s = np.array([job.limit_s for job in jobs], float)
    duration = given_done(middle, spread, limit_s, np.zeros(len(jobs)))
    return Candidates(
        rank=rank,
        kind=kind,
        low_s=duration.low_s,
        expected_s=duration.middle_s,
        high_s=duration.high_s,
        limit_s=limit_s,
        waited_s=now_s - np.array([job.eligible_s for job in jobs], float),
        own_pct=np.array(own, float) if any(pct < np.inf for pct in own) else None,
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
    return Terms(PairRates(forward.mean, forward.low, backward.mean.T, backward.low.T, can_share), settings)


class Compatible:
    """All that must fit between a guest and a resident besides rates and priority."""

    def __init__(
        self,
        sites: Sites,
        jobs: Sequence[PendingJob],
        waiting: Candidates,
        residents: Sequence[OpenResident],
        running: Running,
        lanes: Residents,
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
        return ok & self._within_limits(guests, columns) if ok.any() else ok

    def to_succeed(self, guests: Ints, columns: Ints) -> Bools:
        """The same where the successor outlasts who is there."""
        ok = self._fits(guests, columns)
        if not ok.any():
            return ok
        cell = np.ix_(self.waiting.kind[guests], self.lanes.kind[columns])
        left = self.running.left.high_s[columns]
        shared_s, lost_s = at_worst(left, self.terms, cell)
        return ok & self._in_time(guests, columns, self.waiting.high_s[guests][:, None], lost_s, left, shared_s - left)

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
        """Whether neither dies of it at its time limit if the rates are at their worst and both run for long."""
        cell = np.ix_(self.waiting.kind[guests], self.lanes.kind[columns])
        d, left = self.waiting.high_s[guests][:, None], self.running.left.high_s[columns]
        guest_lost = d * (self.terms.stay_high[cell] - 1.0)
        with np.errstate(invalid="ignore"):
            resident_lost = np.fmin(d * self.terms.delay_high[cell], left * (1.0 / self.terms.resident_low[cell] - 1.0))
        return self._in_time(guests, columns, d, guest_lost, left, resident_lost)

    def _in_time(
        self, guests: Ints, columns: Ints, d: Floats, guest_lost: Floats, left: Floats, resident_lost: Floats
    ) -> Bools:
        """Whether what each loses can be given back, or fits its limit as it is."""
        margin = 1.0 - self.settings.limit_margin_pct / 100.0
        reserved_in_s = self.sites.reserved_in_s[self.sites.node[self.gpus[columns]]]
        limit_s, limit_left_s = self.waiting.limit_s[guests][:, None], self.running.limit_left_s[columns]
        guest_grows, resident_grows = np.zeros(1), np.zeros(1)
        if self.settings.extend_time_limit:
            may_grow_s = np.array([self.jobs[i].may_grow_s for i in guests.tolist()], float)[:, None]
            with np.errstate(invalid="ignore"):  # neither a limit nor a reservation: inf - inf
                guest_grows = np.fmin(may_grow_s, reserved_in_s - limit_s)
                resident_grows = np.fmin(self.running.may_grow_s[columns], reserved_in_s - limit_left_s)
        ok: Bools = (guest_lost <= guest_grows) | (d + guest_lost <= margin * limit_s)
        ok &= (resident_lost <= resident_grows) | (left + resident_lost <= margin * limit_left_s)
        return ok


@dataclass(frozen=True, slots=True)
class PairArrays:
    """Some pending jobs (rows) and some open residents (columns), as all rules look at them."""

    waiting: Candidates
    running: Running
    lanes: Residents
    gpus: Ints
    terms: Terms
    compatible: Compatible


def pair_arrays(
    snapshot: Snapshot,
    knowledge: Knowledge,
    settings: PolicySettings,
    sites: Sites,
    wanted: Ints,
    guests: Sequence[tuple[int, PendingJob]],
    residents: Sequence[OpenResident],
) -> PairArrays:
    """`guests` come with their places in the queue, `wanted` is by GPU the first place that needs it whole."""
    jobs = [job for _, job in guests]
    guest_tokens, guest_kind = numbered([job.token or "" for job in jobs])
    lane_tokens, lane_kind = numbered([resident.job.token or "" for resident in residents])
    terms = terms_between(guest_tokens, lane_tokens, knowledge, snapshot.never_together, settings)
    running = Running.of([resident.job for resident in residents], snapshot.now_s, settings)
    gpus = np.array([resident.gpu for resident in residents], np.int64)
    lanes = residents_of(residents, running, lane_kind, wanted[gpus], settings)
    ranks = np.array([rank for rank, _ in guests], np.int64)
    waiting = candidates_of(jobs, ranks, guest_kind, snapshot.now_s, settings)
    compatible = Compatible(sites, jobs, waiting, residents, running, lanes, terms, settings)
    return PairArrays(waiting, running, lanes, gpus, terms, compatible)


def numbered(tokens: Sequence[str]) -> tuple[list[str], Ints]:
    """The different tokens, and for each of `tokens` its number among them: jobs of one token share their rates."""
    names = list(dict.fromkeys(tokens))
    at = {name: i for i, name in enumerate(names)}
    return names, np.array([at[token] for token in tokens], np.int64)
