"""Is sharing what it was promised to be? Pairs are looked at while they last: measure, judge, act, learn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from slurm_gpushare.helper import explain, log
from slurm_gpushare.helper.durations import given_done
from slurm_gpushare.helper.observe import View, expectation
from slurm_gpushare.helper.occupancy import token_of
from slurm_gpushare.helper.pair_speeds import ACTIVITY, CARD, MeasuredRate, Tally, is_believed, seen_rate
from slurm_gpushare.helper.pairs import Ledger, Pair, PairKey, Turn
from slurm_gpushare.helper.profile_check import unlike_profile
from slurm_gpushare.helper.promises import Judged, Keeper, Standing
from slurm_gpushare.helper.queue_facts import SharingCost, TokenFacts, token_facts
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.history import Decision
from slurm_gpushare.protocol.record import Record
from slurm_gpushare.protocol.settings import Config, SitePromises
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import BrokenPromise, Observation
from slurm_gpushare.store.workloads import Profile


@dataclass(frozen=True, slots=True)
class _Accounts:
    """What jobs have lost, whose tokens are to be measured anew, and what was promised."""

    costs: Mapping[int, SharingCost]
    anew: Collection[str]
    promises: SitePromises


class Watch:
    """Follows the pairs that share."""

    def __init__(self, store: Store, slurm: Slurm, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._measured = PairMeasurements(store)
        self.keeper = Keeper(slurm)
        self._memory = MemoryWatch(store, slurm, self.keeper)
        self._started = False
        self._entered: set[tuple[int, int]] = set()

    def look(self, turn: Turn, view: View, config: Config) -> list[Decision]:
        """Compare, act, learn; returns what was decided about jobs."""
        now_s, pairs = view.now_s, list(turn.now.values())
        if not self._started:
            self.keeper.forgotten.recall(self._store, view.jobs.values())
        # A helper that has just started lets everybody go on, and then judges anew.
        decisions = self.keeper.tidy(view, {pair.guest.raw_id for pair in pairs} if self._started else set())
        self._started = True
        jobs = {job.raw_id for pair in pairs for job in (pair.resident, pair.guest)}
        records = self._store.live.of_jobs(jobs) if jobs else {}
        by_model = self._store.profiles.by_model({token for pair in pairs for token in pair.tokens}) if pairs else {}
        for pair in pairs:
            seen = self._measured.take(pair, records, by_model.get(pair.gpu_model, {}))
            self._ledger.measured(pair.key, seen.rate(pair.resident), seen.rate(pair.guest))
        costs = self._ledger.sharing() if pairs else {}
        anew = self._store.conduct.to_measure() if pairs else frozenset()
        for pair in (self._ledger.pairs[pair.key] for pair in pairs if pair.key in self._ledger.pairs):
            seen, profiles = self._measured.of(pair), by_model.get(pair.gpu_model, {})
            judged = self._judge(pair, seen, profiles, _Accounts(costs, anew, config.promises), now_s)
            self._note_broken(judged, now_s)
            decisions += self._memory.look(pair, seen.records, profiles, view, config)
            decisions += self.keeper.keep(judged, view, config)
        self._measured.learn(pairs, now_s)
        ended = self._measured.finish(turn.ended, now_s)
        return decisions + self._memory.ended(ended, now_s)

    def _note_broken(self, judged: Judged, now_s: float) -> None:
        """Keep the two apart from now on, and enter each broken promise once into the audit trail."""
        pair = judged.pair
        for (job, by), standing in zip(pair.sides, judged.standings, strict=True):
            if not standing.broken:
                continue
            self._store.sharing.ban(*pair.tokens, now_s)
            if (job.raw_id, by.raw_id) not in self._entered:
                self._entered.add((job.raw_id, by.raw_id))
                entry = BrokenPromise(
                    int(now_s), job.raw_id, job.uid, by.raw_id, by.uid, pair.card.node, pair.card.index,
                    round(standing.promise_pct, 1), round(standing.slowed_pct, 1),
                )  # fmt: skip
                self._store.conduct.broke([entry])

    def measured(self, raw_id: int) -> bool:
        """Whether a running job's rate was measured, not only predicted."""
        return self._measured.has(raw_id)

    def _judge(
        self,
        pair: Pair,
        seen: SeenPair,
        profiles: Mapping[str, Profile],
        accounts: _Accounts,
        now_s: float,
    ) -> Judged:
        def standing(job: Job, rate: float) -> Standing:
            cost, measured = accounts.costs.get(job.raw_id, SharingCost()), seen.rates.get(job.raw_id)
            profile = profiles.get(token_of(job) or "")
            return Standing(
                promise_pct=accounts.promises.of(guest=cost.joined, own_pct=job.tag.max_isd_pct if job.tag else None),
                run_s=run_low_s(job, cost.lost_s, token_facts(profile) if profile else TokenFacts(), now_s),
                lost_s=cost.lost_s + job.paused_s(now_s),
                shared_s=self._ledger.shared_s(pair.key),
                loss=1.0 - min(1.0, rate),
                error=measured.error if measured else 0.0,
                measured=measured is not None,
            )

        true = [
            token_of(job) not in accounts.anew
            and not unlike_profile(seen.records.get(job.raw_id), profiles.get(token_of(job) or ""))
            for job in (pair.resident, pair.guest)
        ]
        return Judged(
            pair,
            standing(pair.resident, pair.resident_rate),
            standing(pair.guest, pair.guest_rate),
            guest_first=true[1] and not true[0],
        )


def run_low_s(job: Job, lost_s: float, facts: TokenFacts, now_s: float) -> float:
    """Alone-time of a running job's whole run if that is short: at least what it has done."""
    elapsed_s = max(0.0, now_s - (job.start_s or now_s) - job.paused_s(now_s))
    limit_s = float("inf") if job.limit_s is None else job.limit_s - job.given_s
    expected = expectation(job, facts)
    numbers = (expected.middle_s, expected.spread, limit_s, max(0.0, elapsed_s - lost_s))
    return float(given_done(*(np.array([number]) for number in numbers)).low_s[0])


# GPU memory, which nothing fences: act as soon as two jobs no longer fit, and learn from those that ran out of it.


NEAR_FULL = 0.9
"""Both jobs' memory over the card's: from here on a failure is taken for out-of-memory."""
_FAILED = frozenset({"FAILED", "OUT_OF_MEMORY"})


class MemoryWatch:
    """Compares what jobs hold of a card with what their profiles said."""

    def __init__(self, store: Store, slurm: Slurm, keeper: Keeper) -> None:
        self._store = store
        self._slurm = slurm
        self._keeper = keeper
        self._told: set[int] = set()

    def look(
        self,
        pair: Pair,
        records: Mapping[int, Record],
        profiles: Mapping[str, Profile],
        view: View,
        config: Config,
    ) -> list[Decision]:
        """Who has outgrown its profile is remembered with what it really needs; if the two no longer fit it must go."""
        decisions: list[Decision] = []
        usable = 1.0 - config.memory_headroom_pct / 100.0
        used = {job.raw_id: _used_mib(records.get(job.raw_id)) for job in (pair.resident, pair.guest)}
        total = max((record.features.mem_total_mib or 0.0 for record in records.values()), default=0.0)
        for job, other in pair.sides:
            profile = profiles.get(token_of(job) or "")
            if profile is None or used[job.raw_id] <= profile.mem_used_mib or job.raw_id in self._told:
                continue
            need, beside = used[job.raw_id], max(used[other.raw_id], _expected_mib(other, profiles))
            self._store.workloads.raise_memory(token_of(job) or "", int(need))  # so nobody joins who would not fit
            if total and need + beside > total * usable:
                self._told.add(job.raw_id)
                why = f"memory: {need:,.0f} MiB do not fit beside {beside:,.0f} of {total:,.0f}"
                log.warning("memory", job=job.key, beside=other.key, why=why)
                decisions += explain.both(job, other, "outgrown", view.now_s, why)
                decisions += self._keeper.requeue(job, other, why, view.now_s, config)
        return decisions

    def ended(self, over: Iterable[tuple[Pair, SeenPair]], now_s: float) -> list[Decision]:
        """Raise the memory estimate of a job that failed while the two filled the card."""
        full = [(pair, seen) for pair, seen in over if _filled(pair, seen)]
        if not full:
            return []
        keys = sorted({job.key for pair, _ in full for job in (pair.resident, pair.guest)})
        try:
            states = {job.key: job.state for job in self._slurm.jobs(keys)}
        except SlurmError as error:
            log.warning("ended-jobs", message=error.what)
            return []
        decisions = []
        for pair, seen in full:
            for job, other in pair.sides:
                if states.get(job.key) in _FAILED:
                    need = _needed_mib(seen.records[job.raw_id], seen.records[other.raw_id])
                    self._store.workloads.raise_memory(token_of(job) or "", need)
                    log.warning("out-of-memory", job=job.key, beside=other.key, mem_mib=need)
                    decisions.append(explain.noted(job, "out-of-memory", now_s, other, mem_mib=need))
        return decisions


def _used_mib(record: Record | None) -> float:
    return (record.features.mem_used_mib or 0.0) if record else 0.0


def _expected_mib(job: Job, profiles: Mapping[str, Profile]) -> float:
    profile = profiles.get(token_of(job) or "")
    return float(profile.mem_used_mib) if profile else 0.0


def _filled(pair: Pair, seen: SeenPair) -> bool:
    records = [seen.records.get(job.raw_id) for job in (pair.resident, pair.guest)]
    used = [record.features.mem_used_mib for record in records if record]
    total = max((record.features.mem_total_mib or 0.0 for record in records if record), default=0.0)
    return len(used) == 2 and total > 0 and sum(value or 0.0 for value in used) >= NEAR_FULL * total


def _needed_mib(record: Record, other: Record) -> int:
    """At least what it had, and more than what its neighbour left of the card."""
    total = record.features.mem_total_mib or other.features.mem_total_mib or 0.0
    left = total - (other.features.mem_used_mib or 0.0)
    return int(max(record.features.mem_used_mib or 0.0, left)) + 1


# The pairs' measurements from look to look: kept for `status`, and learned from when they have full weight.


FULL_WEIGHT_S = 120.0
"""A pair that was watched so long is learned from at once: its own end may be days away."""
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
    learned: bool = False

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
            sides = (pair.resident.raw_id, pair.guest.raw_id)
            before, card = (
                {job: Tally.of(name, records[job].shared) if job in records else Tally() for job in sides}
                for name in (ACTIVITY, CARD)
            )
            expected = dict(zip(sides, (pair.resident_rate, pair.guest_rate), strict=True))
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
            if not seen.learned and len(seen.rates) == 2 and now_s - pair.since_s >= FULL_WEIGHT_S:
                seen.learned = True
                self._store.observations.add(list(self._observations(pair, seen, now_s)))
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
        new = [item for pair, seen in over if not seen.learned for item in self._observations(pair, seen, now_s)]
        self._store.observations.add(new)
        spans = {
            PairKey(span.resident_job, span.guest_job): span.id
            for pair, _ in over
            for span in self._store.sharing.of_job(pair.guest.raw_id)
        }
        self._tell(spans, {pair.key: seen for pair, seen in over})
        return over

    def _tell(self, spans: Mapping[PairKey, int], changed: Mapping[PairKey, SeenPair]) -> None:
        known = {spans[key]: (key, seen.found()) for key, seen in changed.items() if key in spans}
        self._store.sharing.seen(
            {span: rates[key.resident] for span, (key, rates) in known.items() if key.resident in rates},
            {span: rates[key.guest] for span, (key, rates) in known.items() if key.guest in rates},
        )
        for seen in changed.values():
            seen.told = seen.found()

    def _observations(self, pair: Pair, seen: SeenPair, now_s: float) -> Iterable[Observation]:
        weight = min(1.0, max(0.05, (now_s - pair.since_s) / FULL_WEIGHT_S))
        for job, other in pair.sides:
            rate = seen.rates.get(job.raw_id)
            if rate is not None:
                source = f"activity:{job.raw_id}:{other.raw_id}:{pair.since_s}"
                yield Observation(
                    source, pair.gpu_model, token_of(job) or "", token_of(other) or "", rate.rate, weight, int(now_s)
                )
