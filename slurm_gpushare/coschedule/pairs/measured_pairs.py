"""The pairs' measurements from look to look: kept for `status`, and learned from when they have full weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_gpushare.coschedule.pairs.contended import CARD, is_believed
from slurm_gpushare.coschedule.pairs.final_records import ACTIVITY
from slurm_gpushare.coschedule.pairs.ledger import Pair, PairKey
from slurm_gpushare.coschedule.pairs.measuring import MeasuredRate, Tally, seen_rate
from slurm_gpushare.coschedule.view.taking_part import token_of
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store
from slurm_gpushare.store.sharing import Observation
from slurm_gpushare.store.workloads import Profile
from slurm_gpushare.telemetry.record import Record

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
