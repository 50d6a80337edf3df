"""Who shares with whom right now, since when, and what it has cost each: the memory behind the residents' budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from slurm_gpushare.helper import log
from slurm_gpushare.helper.loop import Work
from slurm_gpushare.helper.occupancy import CardUse, GpuAddress, token_of
from slurm_gpushare.helper.queue_facts import SharingCost
from slurm_gpushare.knowledge.rates import Knowledge, KnowledgeByModel, known_on
from slurm_gpushare.protocol.errors import SlurmError
from slurm_gpushare.protocol.history import Span, SpanSide, StoredJob
from slurm_gpushare.protocol.record import UNDER_MPS
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.store import Store


def is_successor(job: Job) -> bool:
    """Whether it was sent beside somebody to have the card after it: then its promise is a resident's."""
    return job.tag is not None and job.tag.successor


class PairKey(NamedTuple):
    """A pair of jobs, by SLURM_JOB_ID."""

    resident: int
    guest: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs that share a card now."""

    card: GpuAddress
    resident: Job
    guest: Job
    since_s: int
    resident_rate: float
    """Predicted, until it has been measured."""
    guest_rate: float
    gpus: int = 1
    """Of gangs: all cards of the node, of which `card` is the first."""
    gpu_model: str = ""
    """Under which name its rates are kept."""
    judged: bool = False
    """Whether both rates have been measured."""

    @property
    def card_model(self) -> str:
        """Under which name profiles are."""
        return self.gpu_model.removesuffix(UNDER_MPS)

    @property
    def key(self) -> PairKey:
        return PairKey(self.resident.raw_id, self.guest.raw_id)

    @property
    def tokens(self) -> tuple[str, str]:
        return token_of(self.resident) or "", token_of(self.guest) or ""

    @property
    def sides(self) -> tuple[tuple[Job, Job], tuple[Job, Job]]:
        """Each of the two, with its neighbour."""
        return (self.resident, self.guest), (self.guest, self.resident)

    @property
    def stands_still(self) -> bool:
        """Whether one of the two is suspended or stopped: then they do not slow each other."""
        return self.resident.stands_still or self.guest.stands_still

    def span(self) -> Span:
        return Span(
            resident_job=self.resident.raw_id,
            guest_job=self.guest.raw_id,
            resident_token=self.tokens[0],
            guest_token=self.tokens[1],
            node=self.card.node,
            gpu_index=self.card.index,
            gpu_model=self.gpu_model,
            start_s=self.since_s,
            resident_rate=self.resident_rate,
            guest_rate=self.guest_rate,
            gpus=self.gpus,
        )


def pairs_now(
    cards: Mapping[GpuAddress, CardUse],
    knowledge: Knowledge | KnowledgeByModel,
    now_s: float,
    known: Mapping[PairKey, Pair] | None = None,
    gpu_models: Mapping[GpuAddress, str] | None = None,
) -> dict[PairKey, Pair]:
    """Every card with two running sharers of ours. The one that started first is the resident.

    Rates are predicted once for a pair, by the knowledge of the card's model: one that is `known` keeps its own.
    """
    found: dict[PairKey, Pair] = {}
    for card, use in cards.items():
        sharers = [share.job for share in use.occupants if not share.whole and token_of(share.job)]
        if len(sharers) != 2:
            continue
        first, second = sorted(sharers, key=lambda job: (job.start_s or now_s, job.raw_id))
        key = PairKey(first.raw_id, second.raw_id)
        if key in found:  # gangs, on another of their cards
            continue
        if known and (earlier := known.get(key)) is not None:
            same = earlier.resident is first and earlier.guest is second
            found[key] = earlier if same else replace(earlier, resident=first, guest=second)
            continue
        tokens = (token_of(first) or "", token_of(second) or "")
        model = (gpu_models or {}).get(card, "")
        rates = known_on(knowledge, model).rates(tokens, tokens).mean
        since = int(max(first.start_s or now_s, second.start_s or now_s))
        gpus = min(first.gang or 1, second.gang or 1)
        found[key] = Pair(card, first, second, since, float(rates[0, 1]), float(rates[1, 0]), gpus, model)
    return found


@dataclass(frozen=True, slots=True)
class PairChanges:
    """What changed between two looks."""

    begun: tuple[Pair, ...]
    ended: tuple[Pair, ...]
    now: Mapping[PairKey, Pair]
    paused_s: Mapping[PairKey, float] = field(default_factory=dict)
    """Of the pairs that do not run beside each other now: for how long that has been so, in all."""


class Ledger:
    """Follows pairs from tick to tick. The store keeps the spans; `recall` brings them back after a restart.

    What is measured of a pair holds for all of its time: it replaces what was predicted. Time in which one of the two
    stands still is no time beside each other.
    """

    def __init__(self, stopwatch: Callable[[], float] | None = None) -> None:
        """`stopwatch` counts seconds and never jumps, as the clock may: no pair shares for longer than it says."""
        self._stopwatch = stopwatch
        self._stopwatch_at_s: float | None = None
        self._pairs: dict[PairKey, Pair] = {}
        self._shared_s: dict[PairKey, float] = {}
        self._paused_s: dict[PairKey, float] = {}
        self._past_lost_s: dict[int, float] = {}
        self._recalled: dict[PairKey, Span] = {}
        self._guests: set[int] = set()
        self._counted_to_s: float | None = None

    @property
    def pairs(self) -> Mapping[PairKey, Pair]:
        """The pairs of the last look."""
        return self._pairs

    def recall(self, spans: Iterable[Span], now_s: float, paused_s: Mapping[int, float] | None = None) -> None:
        """Take up spans from the store, those of past guests too: what jobs that still run have lost in them.

        `paused_s` is how long jobs were paused, by SLURM_JOB_ID: it tells of pauses that no helper saw the end of.
        """
        spans = list(spans)
        earlier_s: dict[int, float] = {}
        for span in spans:
            if span.end_s is not None:
                earlier_s[span.guest_job] = earlier_s.get(span.guest_job, 0.0) + span.paused_s
        for span in spans:
            lasted = max(0.0, (span.end_s or now_s) - span.start_s)
            key = PairKey(span.resident_job, span.guest_job)
            self._guests.add(span.guest_job)
            if span.end_s is None:
                unseen_s = (paused_s or {}).get(span.guest_job, 0.0) - earlier_s.get(span.guest_job, 0.0)
                self._paused_s[key] = min(lasted, max(unseen_s, span.paused_s))
                self._shared_s[key] = lasted - self._paused_s[key]
                self._recalled[key] = span
                continue
            lasted = max(0.0, lasted - span.paused_s)
            for side in span.sides:
                self._past_lost_s[side.job] = self._past_lost_s.get(side.job, 0.0) + lasted * (1.0 - _rate(side))
        self._counted_to_s = now_s

    def follow(self, current: Mapping[PairKey, Pair], running: Iterable[Job], now_s: float) -> PairChanges:
        """Go on to `now_s`, when `current` pairs share: count what the time since the last look cost."""
        known = {key: self._as_known(key, pair) for key, pair in current.items()}
        self._recalled = {}
        most_s = self._since_last_look_s()
        for key, pair in known.items():
            from_s = max(self._counted_to_s or pair.since_s, pair.since_s)
            step_s = min(most_s, max(0.0, now_s - from_s))
            counted = self._paused_s if pair.stands_still else self._shared_s
            counted[key] = counted.get(key, 0.0) + step_s
            self._guests.add(pair.guest.raw_id)
        ended = tuple(pair for key, pair in self._pairs.items() if key not in known)
        for pair in ended:
            for job, lost_s in self._losses(pair):
                self._past_lost_s[job] = self._past_lost_s.get(job, 0.0) + lost_s
        changes = PairChanges(
            begun=tuple(pair for key, pair in known.items() if key not in self._pairs),
            ended=ended,
            now=known,
            paused_s={key: self._paused_s[key] for key, pair in known.items() if pair.stands_still},
        )
        self._pairs = known
        self._counted_to_s = now_s
        jobs = {job.raw_id: job for job in running}
        alive = jobs.keys()
        self._shared_s = {key: shared_s for key, shared_s in self._shared_s.items() if key in known}
        self._paused_s = {key: paused_s for key, paused_s in self._paused_s.items() if key in known}
        self._past_lost_s = {job: lost for job, lost in self._past_lost_s.items() if job in alive}
        self._guests = {job for job in self._guests & alive if not is_successor(jobs[job])}
        return changes

    def _since_last_look_s(self) -> float:
        """The longest that a pair can have shared since the last look; a second more, since Slurm's times are whole."""
        if self._stopwatch is None:
            return math.inf
        before, self._stopwatch_at_s = self._stopwatch_at_s, self._stopwatch()
        return math.inf if before is None else self._stopwatch_at_s - before + 1.0

    def _as_known(self, key: PairKey, pair: Pair) -> Pair:
        """The pair with the rates that it had at the last look, also of another helper."""
        earlier = self._pairs.get(key)
        if earlier is not None:
            rates, since_s = (earlier.resident_rate, earlier.guest_rate), earlier.since_s
        elif key in self._recalled:
            recalled = self._recalled[key]
            rates, since_s = (_rate(recalled.sides[0]), _rate(recalled.sides[1])), recalled.start_s
        else:
            return pair
        judged = earlier is not None and earlier.judged
        return replace(pair, resident_rate=rates[0], guest_rate=rates[1], since_s=since_s, judged=judged)

    def measured(self, key: PairKey, resident_rate: float | None, guest_rate: float | None) -> None:
        """Count with what was measured instead of predicted."""
        pair = self._pairs.get(key)
        if pair is not None:
            self._pairs[key] = replace(
                pair,
                resident_rate=pair.resident_rate if resident_rate is None else resident_rate,
                guest_rate=pair.guest_rate if guest_rate is None else guest_rate,
                judged=pair.judged or None not in (resident_rate, guest_rate),
            )

    def shared_s(self, key: PairKey) -> float:
        """How long a pair has run beside each other, pauses left out."""
        return self._shared_s.get(key, 0.0)

    def _losses(self, pair: Pair) -> tuple[tuple[int, float], tuple[int, float]]:
        shared_s = self.shared_s(pair.key)
        return (
            (pair.resident.raw_id, shared_s * (1.0 - min(1.0, pair.resident_rate))),
            (pair.guest.raw_id, shared_s * (1.0 - min(1.0, pair.guest_rate))),
        )

    def sharing(self) -> dict[int, SharingCost]:
        """What each job has been through, by SLURM_JOB_ID."""
        lost_s = dict(self._past_lost_s)
        now = [loss for pair in self._pairs.values() for loss in self._losses(pair)]
        for key, span in self._recalled.items():
            now += [(side.job, self.shared_s(key) * (1.0 - _rate(side))) for side in span.sides]
        for job, here_s in now:
            lost_s[job] = lost_s.get(job, 0.0) + here_s
        judged = {job for key, pair in self._pairs.items() if pair.judged for job in key}
        some = lost_s.keys() | self._guests
        return {job: SharingCost(lost_s.get(job, 0.0), job in self._guests, job in judged) for job in some}


def _rate(side: SpanSide) -> float:
    return 1.0 if side.rate is None else min(1.0, side.rate)


# The store's spans of sharing: begun and ended as pairs come and go.


class SpanKeeper:
    """Writes begun and ended pairs to the store. What could not be written is written at the next look."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._begun: dict[PairKey, Pair] = {}
        self._paused_s: dict[PairKey, float] = {}
        self._ended: dict[PairKey, float] = {}
        """When each pair was first seen to be over."""

    async def keep(self, changes: PairChanges, now_s: float) -> None:
        """Write what has changed, after earlier changes whose writing failed."""
        self._begun.update((pair.key, pair) for pair in changes.begun)
        self._paused_s.update(changes.paused_s)
        self._ended.update((pair.key, now_s) for pair in changes.ended)
        if self._begun:
            self._store.sharing.begin([pair.span() for pair in self._begun.values()])
            self._begun.clear()
        open_spans = self._store.sharing.open() if self._paused_s or self._ended else []
        if self._paused_s:
            keys = {span.id: PairKey(span.resident_job, span.guest_job) for span in open_spans}
            self._store.sharing.paused(
                {span: round(self._paused_s[key]) for span, key in keys.items() if key in self._paused_s}
            )
            self._paused_s.clear()
        if self._ended:
            over = [span for span in open_spans if span.start_s <= self._noticed_s(span)]
            noticed_s = {span.id: self._noticed_s(span) for span in over}
            self._store.sharing.end(await Work(_ends, over, self._slurm, noticed_s, now_s))
            self._ended.clear()

    def _noticed_s(self, span: Span) -> float:
        """When the span was seen to be over; before all time if it was not."""
        return self._ended.get(PairKey(span.resident_job, span.guest_job), float("-inf"))


def follow(
    store: Store, jobs: Iterable[Job], known: Mapping[str, StoredJob] | None, now_s: float
) -> dict[str, StoredJob]:
    """Let the store know every job with a tag; those in the queue, by key. `known` is what the last call said."""
    mine = (job for job in jobs if job.tag is not None or known is None or job.key in known)
    return store.jobs.follow([_stored(job) for job in mine if job.pending or job.running], now_s)


def _stored(job: Job) -> StoredJob:
    tag = job.tag
    return StoredJob(
        job.key, job.raw_id, job.uid, job.submit_s, job.submit_s, job.restarts, job.start_s if job.running else None,
        tag.token if tag else None, str(tag) if tag else "",
    )  # fmt: skip


def past_spans(
    store: Store,
    slurm: Slurm,
    jobs: Collection[Job],
    now_s: float,
    dry_run: bool = False,
    known: Mapping[str, StoredJob] = MappingProxyType({}),
) -> list[Span]:
    """For a helper that starts: every span of the jobs that run now, with the neighbours that they had before too.

    Spans whose pair came apart while no helper looked are ended first: two jobs on a card share it for as long as both
    run, so they ended when the first of the two did, or else when a helper was last alive. `known` are the jobs in the
    queue as the store has them: what others did under their ids is not theirs.
    """
    running = {job.raw_id for job in jobs if job.running}
    over = [span for span in store.sharing.open() if not {span.resident_job, span.guest_job} <= running]
    last_s = min(now_s, store.live.heartbeat_s() or now_s) if over else now_s
    ends = _ends(over, slurm, dict.fromkeys((span.id for span in over), last_s), now_s)
    if ends and not dry_run:
        store.sharing.end(ends)
    begun_s = {job.job_id: job.first_submit_s for job in known.values()}
    spans = store.sharing.of_jobs(
        {
            job.raw_id: [(begun_s.get(job.raw_id, min(job.submit_s, job.start_s or job.submit_s)), now_s)]
            for job in jobs
            if job.running
        }
    )
    return [replace(span, end_s=ends.get(span.id, span.end_s)) for span in spans]


def _ends(over: Collection[Span], slurm: Slurm, otherwise_s: Mapping[int, float], now_s: float) -> dict[int, int]:
    """When spans ended, by id: when the first of the two jobs did. Slurm knows that of jobs that ended lately."""
    if not over:
        return {}
    ids = sorted({job for span in over for job in (span.resident_job, span.guest_job)})
    try:
        ended = {job.raw_id: job.end_s for job in slurm.jobs(map(str, ids)) if not job.running and job.end_s}
    except SlurmError as error:
        log.info("ended-jobs", message=error.what)
        ended = {}
    ends = {}
    for span in over:
        known_s = [ended[job] for job in (span.resident_job, span.guest_job) if job in ended]
        ends[span.id] = int(max(span.start_s, min(min(known_s, default=otherwise_s[span.id]), now_s)))
    return ends
