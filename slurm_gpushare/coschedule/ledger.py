"""Who shares with whom right now, since when, and what it has cost each: the memory behind the residents' budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from slurm_gpushare.coschedule.observe import Sharing, whose
from slurm_gpushare.coschedule.occupancy import Card, CardUse
from slurm_gpushare.knowledge.rates import Knowledge
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.sharing import Span


def is_heir(job: Job) -> bool:
    """Whether it was sent beside somebody to have the card after it: then its promise is a resident's."""
    return job.tag is not None and job.tag.heir


class PairKey(NamedTuple):
    """A pair of jobs, by SLURM_JOB_ID."""

    resident: int
    guest: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs that share a card now."""

    card: Card
    resident: Job
    guest: Job
    since_s: int
    resident_rate: float
    """Predicted, until it has been measured."""
    guest_rate: float

    @property
    def key(self) -> PairKey:
        return PairKey(self.resident.raw_id, self.guest.raw_id)

    def span(self, gpu_model: str) -> Span:
        return Span(
            resident_job=self.resident.raw_id,
            guest_job=self.guest.raw_id,
            resident_token=whose(self.resident) or "",
            guest_token=whose(self.guest) or "",
            node=self.card.node,
            gpu_index=self.card.index,
            gpu_model=gpu_model,
            start_s=self.since_s,
            resident_rate=self.resident_rate,
            guest_rate=self.guest_rate,
        )


def pairs_now(cards: Mapping[Card, CardUse], knowledge: Knowledge, now_s: float) -> dict[PairKey, Pair]:
    """Every card with two running sharers of ours. The one that started first is the resident."""
    found: dict[PairKey, Pair] = {}
    for card, use in cards.items():
        sharers = [holding.job for holding in use.holders if not holding.whole and whose(holding.job)]
        if len(sharers) != 2:
            continue
        first, second = sorted(sharers, key=lambda job: (job.start_s or now_s, job.raw_id))
        tokens = (whose(first) or "", whose(second) or "")
        rates = knowledge.rates(tokens, tokens).mean
        since = int(max(first.start_s or now_s, second.start_s or now_s))
        pair = Pair(card, first, second, since, float(rates[0, 1]), float(rates[1, 0]))
        found[pair.key] = pair
    return found


@dataclass(frozen=True, slots=True)
class Turn:
    """What changed between two looks."""

    begun: tuple[Pair, ...]
    ended: tuple[Pair, ...]
    now: Mapping[PairKey, Pair]


class Ledger:
    """Follows pairs from tick to tick. The store keeps the spans; `recall` brings them back after a restart."""

    def __init__(self) -> None:
        self._pairs: dict[PairKey, Pair] = {}
        self._lost_s: dict[int, float] = {}
        self._guests: set[int] = set()
        self._counted_to_s: float | None = None

    def recall(self, spans: Iterable[Span], now_s: float) -> None:
        """Take up spans from the store: what jobs that still run have lost in them."""
        for span in spans:
            lasted = max(0.0, (span.end_s or now_s) - span.start_s)
            for job, seen, predicted in (
                (span.resident_job, span.resident_rate_seen, span.resident_rate),
                (span.guest_job, span.guest_rate_seen, span.guest_rate),
            ):
                rate = seen if seen is not None else predicted if predicted is not None else 1.0
                self._lost_s[job] = self._lost_s.get(job, 0.0) + lasted * (1.0 - min(1.0, rate))
            self._guests.add(span.guest_job)
        self._counted_to_s = now_s

    def turn(self, current: Mapping[PairKey, Pair], running: Iterable[Job], now_s: float) -> Turn:
        """Go on to `now_s`, when `current` pairs share: count what the time since the last look cost."""
        known = {
            key: replace(
                pair,
                resident_rate=self._pairs[key].resident_rate,
                guest_rate=self._pairs[key].guest_rate,
                since_s=self._pairs[key].since_s,
            )
            if key in self._pairs
            else pair
            for key, pair in current.items()
        }
        for pair in known.values():
            from_s = max(self._counted_to_s or pair.since_s, pair.since_s)
            step_s = max(0.0, now_s - from_s)
            for job, rate in ((pair.resident, pair.resident_rate), (pair.guest, pair.guest_rate)):
                self._lost_s[job.raw_id] = self._lost_s.get(job.raw_id, 0.0) + step_s * (1.0 - min(1.0, rate))
            self._guests.add(pair.guest.raw_id)
        turn = Turn(
            begun=tuple(pair for key, pair in known.items() if key not in self._pairs),
            ended=tuple(pair for key, pair in self._pairs.items() if key not in known),
            now=known,
        )
        self._pairs = known
        self._counted_to_s = now_s
        jobs = {job.raw_id: job for job in running}
        alive = jobs.keys()
        self._lost_s = {job: lost for job, lost in self._lost_s.items() if job in alive}
        self._guests = {job for job in self._guests & alive if not is_heir(jobs[job])}
        return turn

    def measured(self, key: PairKey, resident_rate: float | None, guest_rate: float | None) -> None:
        """From now on count with what was measured instead of predicted."""
        pair = self._pairs.get(key)
        if pair is not None:
            self._pairs[key] = replace(
                pair,
                resident_rate=pair.resident_rate if resident_rate is None else resident_rate,
                guest_rate=pair.guest_rate if guest_rate is None else guest_rate,
            )

    def sharing(self) -> dict[int, Sharing]:
        """For the snapshot, by SLURM_JOB_ID."""
        return {
            job: Sharing(self._lost_s.get(job, 0.0), job in self._guests) for job in self._lost_s.keys() | self._guests
        }
