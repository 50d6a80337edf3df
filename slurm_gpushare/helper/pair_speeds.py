"""How fast two jobs run beside each other, as their nodes measure it.

A job's own share of the GPU's time, while shared over while alone, is how fast it runs: the same work needs the same
time on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from slurm_gpushare.helper.occupancy import token_of
from slurm_gpushare.helper.pairs import Pair, PairKey
from slurm_gpushare.knowledge.rates import UNIT_SD
from slurm_gpushare.protocol.record import ENOUGH, Period, Record, Stat
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.workloads import Profile


@dataclass(frozen=True, slots=True)
class Tally:
    """Samples of an attribute, up to some moment, and the time that they stand for."""

    n: int = 0
    seconds: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, attribute: str, *periods: Period) -> Tally:
        """Of all these periods together."""
        parts = [(period.seconds, period.stats[attribute]) for period in periods if attribute in period.stats]
        return cls(
            sum(stat.n for _, stat in parts),
            sum(seconds for seconds, _ in parts),
            sum(seconds * stat.mean for seconds, stat in parts),
        )

    def since(self, before: Tally) -> float | None:
        """The mean of what came after `before`."""
        return (self.total - before.total) / (self.seconds - before.seconds) if self.seconds > before.seconds else None


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """A rate, and how far it may be off (one standard deviation)."""

    rate: float
    error: float


def seen_rate(record: Record, before: Tally, profile: Profile | None) -> MeasuredRate | None:
    """How fast the job runs beside its present neighbour; None while too little was seen.

    `before` are the samples of earlier neighbours, which the record sums up with the present one's.
    """
    alone = activity_alone(record, profile.features.get(ACTIVITY_MEAN) if profile else None, least=ENOUGH)
    now = Tally.of(ACTIVITY, record.shared)
    n, shared_pct = now.n - before.n, now.since(before)
    if alone is None or shared_pct is None or n < ENOUGH or alone.pct < MIN_ACTIVITY_PCT:
        return None
    rate = min(1.0, max(0.02, shared_pct / alone.pct))
    shared_error = relative_error(record.shared.stats[ACTIVITY], n)
    return MeasuredRate(rate, rate * math.hypot(shared_error, alone.error, LEAST_ERROR))


# Can a neighbour have cost a job what it lost? Only as far as the card was busy.
#
# A job that does less than alone while the card has time to spare waits for something else, or idles on purpose: its
# neighbour must not pay for that.


CARD = "card_util_pct"
"""How busy the whole card was, in the job's own record."""
BUSY_PCT = 80.0
"""On a card as busy as this any loss is believed; on one half as busy, half of a job's speed."""
NEAR = 1.25
"""A loss up to so many times the predicted one is no surprise and needs no busy card."""
SLICING = 0.05
"""What any neighbour may cost beyond that: the card changes between the two."""


def is_believed(rate: float, expected: float, card_pct: float | None) -> bool:
    """Whether a rate as low as this can be the neighbour's doing. A card that tells nothing is no proof against it."""
    if card_pct is None:
        return True
    return 1.0 - rate <= max(card_pct / BUSY_PCT, NEAR * (1.0 - min(1.0, expected))) + SLICING


# What the final record of a job that shared says of its rates: of spans of a few seconds too.
#
# A job's own share of the GPU's time, while shared over while alone, is how fast it ran. The record sums up all of its
# neighbours; where it had several, those whose effect was not measured meanwhile are told apart by what was expected.


ACTIVITY = "proc_sm_pct"
MIN_ACTIVITY_PCT = 3.0
"""Below it the ratio of two samples says nothing."""
ACTIVITY_MEAN = f"{ACTIVITY}_mean"
"""As a profile has it."""
MIN_SAMPLES = 3
SAMPLES_APART = 2.0
"""So many samples in a row tell as much as one: the card's figures are averages over up to a second."""
LEAST_ERROR = 0.03
"""Relative; what no number of samples takes away."""
PROFILE_ERROR = 0.05
"""Relative, of a profile's activity against that of this run alone: runs differ."""
LEAST_PART = 0.05
"""A neighbour with less of the shared time than this cannot be told apart from the others."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A neighbour of the job: how long, and what is known of the job's rate beside it."""

    token: str
    seconds: float
    expected: float
    """The rate as it was predicted."""
    measured: float | None = None
    """The rate as it was measured while they shared."""


class Alone(NamedTuple):
    """How active a job is alone, in per cent, and how far that may be off (relative)."""

    pct: float
    error: float


@dataclass(frozen=True, slots=True)
class Lesson:
    """A rate that was seen, and its weight as an observation."""

    rate: float
    weight: float


def lessons(record: Record, alone_pct: float | None, beside: Mapping[int, Beside]) -> dict[int, Lesson]:
    """What is learned of each neighbour, by job. `alone_pct` is the activity alone as the profile has it."""
    shared, base = record.shared.stats.get(ACTIVITY), activity_alone(record, alone_pct)
    if base is None or shared is None or shared.n < MIN_SAMPLES or base.pct < MIN_ACTIVITY_PCT or record.outsiders:
        return {}
    seconds = sum(item.seconds for item in beside.values())
    new = {job: item for job, item in beside.items() if item.measured is None and item.seconds >= LEAST_PART * seconds}
    if not new or seconds < 0.9 * record.shared.shared_s:  # somebody was there of whom nothing is known
        return {}
    part = sum(item.seconds for item in new.values()) / seconds
    known = sum(item.seconds * (item.measured or item.expected) for job, item in beside.items() if job not in new)
    left = shared.mean / base.pct - known / seconds  # of the mean rate, for those who are new
    expected = sum(item.seconds * item.expected for item in new.values()) / seconds
    card = record.shared.stats.get(CARD)
    foreseen = expected + known / seconds
    if left <= 0.0 or not is_believed(shared.mean / base.pct, foreseen, card.mean if card else None):
        return {}
    error = math.hypot(relative_error(shared, shared.n), base.error, LEAST_ERROR) / part
    found = {}
    for job, item in new.items():
        among = item.seconds / seconds
        rate = min(1.0, max(0.02, item.expected * left / expected))
        weight = (UNIT_SD / error) ** 2 * (among / part) ** 2
        found[job] = Lesson(rate, min(1.0, max(0.01, weight)))
    return found


def activity_alone(record: Record, profile_pct: float | None, least: int = MIN_SAMPLES) -> Alone | None:
    """By this run, of which `least` samples are enough, and by the profile, each as far as it can be trusted.

    Epochs begin and end quietly. How a run was alone for less than an epoch says little of how it is on average.
    """
    own = record.alone.stats.get(ACTIVITY)
    profile = None if profile_pct is None else Alone(profile_pct, PROFILE_ERROR)
    if own is None or own.n < least or own.mean <= 0.0:
        return profile
    phase = own.sd / own.mean * record.profile.seconds / (2.0 * max(record.alone_s, 1.0))
    run = Alone(own.mean, math.hypot(relative_error(own, own.n), phase))
    if profile is None:
        return run
    by_run, by_profile = max(run.error, 1e-6) ** -2, profile.error**-2
    pct = (by_run * run.pct + by_profile * profile.pct) / (by_run + by_profile)
    return Alone(pct, (by_run + by_profile) ** -0.5)


def rates_of_run(record: Record, alone_pct: float | None, beside: Mapping[int, Beside]) -> dict[int, float]:
    """How fast a job that ended ran beside each neighbour, by job; empty where too little was seen of it.

    All that a run did on the GPU, alone and shared, is what it would have done alone: whichever part of its epochs was
    shared. What it lost so is divided among its neighbours as it was measured, or expected, while they were there.
    """
    shared, base = record.shared.stats.get(ACTIVITY), activity_alone(record, alone_pct)
    seconds = sum(item.seconds for item in beside.values())
    if base is None or shared is None or shared.n < ENOUGH or base.pct < MIN_ACTIVITY_PCT:
        return {}
    if seconds < 0.9 * record.shared_s:  # somebody was there of whom nothing is known
        return {}
    periods = ((record.alone, record.alone_s), (record.shared, record.shared_s))
    lost_s = sum(took_s * (1.0 - p.stats[ACTIVITY].mean / base.pct) for p, took_s in periods if ACTIVITY in p.stats)
    loss, card = min(max(lost_s / record.shared_s, 0.0), 0.98), record.shared.stats.get(CARD)
    supposed = {job: 1.0 - (item.measured or item.expected) for job, item in beside.items()}
    mean = sum(item.seconds * supposed[job] for job, item in beside.items()) / seconds
    if not is_believed(1.0 - loss, 1.0 - mean, card.mean if card else None):
        return {}
    return {
        job: min(1.0, max(0.02, 1.0 - (loss * one / mean if mean > 0.01 else loss))) for job, one in supposed.items()
    }


def relative_error(stat: Stat, n: int) -> float:
    """Relative error of the mean of `n` samples that scatter like these."""
    return stat.sd / max(stat.mean, 1e-9) / math.sqrt(max(1.0, n / SAMPLES_APART))


# The pairs' measurements from look to look: kept for `status`, and learned from when they have full weight.


FULL_WEIGHT_S = 120.0
"""A pair that was watched so long has told all that it has to tell: its own end may be days away."""
VERDICT_WEIGHT = 0.5
"""What its first verdict counts, seconds after it has begun: of twenty samples, 7 % off."""
TELL_CHANGE = 0.02


@dataclass(slots=True)
class SeenPair:
    """What was measured of a pair so far, by SLURM_JOB_ID."""

    before: dict[int, Tally]
    card_before: dict[int, Tally]
    expected: dict[int, float]
    """Rates as they were predicted."""
    idle: set[int] = field(default_factory=set)
    """Who does so much less than alone that it cannot be the neighbour's doing: it has lost nothing here."""
    records: dict[int, Record] = field(default_factory=dict)
    rates: dict[int, MeasuredRate] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)
    """Rates as the store has them."""
    learned: float = 0.0
    """The weight of what was learned of it so far."""

    def rate(self, job: Job) -> float | None:
        return self.found().get(job.raw_id)

    def found(self) -> dict[int, float]:
        """How fast each ran as far as its neighbour is concerned."""
        return {job: rate.rate for job, rate in self.rates.items()} | dict.fromkeys(self.idle, 1.0)


class PairMeasurements:
    """Follows what nodes report about pairs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[PairKey, SeenPair] = {}

    def of(self, pair: Pair) -> SeenPair:
        return self._seen[pair.key]

    def has(self, raw_id: int) -> bool:
        """Whether the rate of a job that shares now was measured."""
        return any(raw_id in seen.rates for seen in self._seen.values())

    def take(self, pair: Pair, records: Mapping[int, Record], profiles: Mapping[str, Profile]) -> SeenPair:
        """Take in what the nodes have reported about a pair since the last look."""
        seen = self._seen.get(pair.key)
        if seen is None:
            before, card = (
                {job.raw_id: _of_earlier_neighbours(name, records.get(job.raw_id), other) for job, other in pair.sides}
                for name in (ACTIVITY, CARD)
            )
            expected = dict(zip(before, (pair.resident_rate, pair.guest_rate), strict=True))
            seen = self._seen[pair.key] = SeenPair(before, card, expected)
        for job in (pair.resident, pair.guest):
            record = records.get(job.raw_id)
            if record is None:
                continue
            seen.records[job.raw_id] = record
            rate = seen_rate(record, seen.before[job.raw_id], profiles.get(token_of(job) or ""))
            if rate is None:
                continue
            card_pct = Tally.of(CARD, record.shared).since(seen.card_before[job.raw_id])
            if is_believed(rate.rate, seen.expected[job.raw_id], card_pct):
                seen.rates[job.raw_id] = rate
                seen.idle.discard(job.raw_id)
            else:
                seen.rates.pop(job.raw_id, None)
                seen.idle.add(job.raw_id)
        return seen

    def learn(self, pairs: Iterable[Pair], now_s: float) -> None:
        """Learn from pairs that have lasted long enough, and keep what `status` shows up to date."""
        changed = {}
        for pair in pairs:
            seen = self._seen[pair.key]
            weight = 1.0 if now_s - pair.since_s >= FULL_WEIGHT_S else VERDICT_WEIGHT
            if len(seen.rates) == 2 and seen.learned < weight:
                self._store.observations.add(_observations(pair, seen, weight, now_s))
            if any(abs(rate - seen.told.get(job, 0.0)) > TELL_CHANGE for job, rate in seen.found().items()):
                changed[pair.key] = seen
        if changed:
            self._tell(
                {PairKey(span.resident_job, span.guest_job): span.id for span in self._store.sharing.open()}, changed
            )

    def finish(self, ended: Iterable[Pair], now_s: float) -> list[tuple[Pair, SeenPair]]:
        """Learn from pairs that ended; returns them with what was seen of them."""
        over = [(pair, self._seen.pop(pair.key)) for pair in ended if pair.key in self._seen]
        if not over:
            return []
        for pair, last in over:
            weight = min(1.0, max(0.05, (now_s - pair.since_s) / FULL_WEIGHT_S))
            if last.learned < weight:
                self._store.observations.add(_observations(pair, last, weight, now_s))
        by_key = {pair.key: seen for pair, seen in over}
        spans = self._store.sharing.of_jobs({pair.guest.raw_id: [(pair.since_s, now_s)] for pair, _ in over})
        for span in spans:  # what the whole run of a job has told since is better than what a part of it told
            if seen := by_key.get(PairKey(span.resident_job, span.guest_job)):
                later = {side.job for side in span.sides if side.seen not in (None, seen.told.get(side.job))}
                for job in later:
                    seen.rates.pop(job, None)
                seen.idle -= later
        self._tell({PairKey(span.resident_job, span.guest_job): span.id for span in spans}, by_key)
        return over

    def _tell(self, spans: Mapping[PairKey, int], changed: Mapping[PairKey, SeenPair]) -> None:
        known = {spans[key]: (key, seen.found()) for key, seen in changed.items() if key in spans}
        self._store.sharing.seen(
            {span: rates[key.resident] for span, (key, rates) in known.items() if key.resident in rates},
            {span: rates[key.guest] for span, (key, rates) in known.items() if key.guest in rates},
        )
        for seen in changed.values():
            seen.told = seen.found()


def _of_earlier_neighbours(attribute: str, record: Record | None, present: Job) -> Tally:
    """The samples of a record that were taken beside others; all of them where they cannot be told apart."""
    if record is None or all(neighbour.job_id == present.raw_id for neighbour in record.neighbours):
        return Tally()
    return Tally.of(attribute, record.shared)


def _observations(pair: Pair, seen: SeenPair, weight: float, now_s: float) -> list[Observation]:
    """What is learned of a pair up to this weight, beyond what was learned of it before."""
    part, more = f":{seen.learned:g}" if seen.learned else "", weight - seen.learned
    seen.learned = weight
    if any(record.outsiders for record in seen.records.values()):
        return []  # what was lost to those tells nothing
    return [
        Observation(
            f"activity:{job.raw_id}:{other.raw_id}:{pair.since_s}{part}", pair.gpu_model,
            token_of(job) or "", token_of(other) or "", seen.rates[job.raw_id].rate, more, int(now_s),
        )
        for job, other in pair.sides
        if job.raw_id in seen.rates
    ]  # fmt: skip
