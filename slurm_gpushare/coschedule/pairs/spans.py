"""The store's spans of sharing: begun and ended as pairs come and go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.pairs.ledger import Pair, PairKey, Turn
from slurm_gpushare.slurm.errors import SlurmError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store.sharing import Span
from slurm_gpushare.store.store import Store


class SpanKeeper:
    """Writes begun and ended pairs to the store. What could not be written is written with the next turn."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._begun: dict[PairKey, Pair] = {}
        self._paused_s: dict[PairKey, float] = {}
        self._ended: dict[PairKey, float] = {}
        """When each pair was first seen to be over."""

    def keep(self, turn: Turn, now_s: float) -> None:
        """Write this turn's spans, after those of earlier turns whose writing failed."""
        self._begun.update((pair.key, pair) for pair in turn.begun)
        self._paused_s.update(turn.paused_s)
        self._ended.update((pair.key, now_s) for pair in turn.ended)
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
            self._store.sharing.end(_ends(over, self._slurm, noticed_s, now_s))
            self._ended.clear()

    def _noticed_s(self, span: Span) -> float:
        """When the span was seen to be over; before all time if it was not."""
        return self._ended.get(PairKey(span.resident_job, span.guest_job), float("-inf"))


def past_spans(store: Store, slurm: Slurm, jobs: Collection[Job], now_s: float, dry_run: bool = False) -> list[Span]:
    """For a helper that starts: every span of the jobs that run now, with the neighbours that they had before too.

    Spans whose pair came apart while no helper looked are ended first: two jobs on a card share it for as long as both
    run, so they ended when the first of the two did, or else when a helper was last alive.
    """
    running = {job.raw_id for job in jobs if job.running}
    over = [span for span in store.sharing.open() if not {span.resident_job, span.guest_job} <= running]
    last_s = min(now_s, store.live.heartbeat_s() or now_s) if over else now_s
    ends = _ends(over, slurm, dict.fromkeys((span.id for span in over), last_s), now_s)
    if ends and not dry_run:
        store.sharing.end(ends)
    spans = store.sharing.of_jobs(running)
    return [replace(span, end_s=ends.get(span.id, span.end_s)) for span in spans]


def _ends(over: Collection[Span], slurm: Slurm, otherwise_s: Mapping[int, float], now_s: float) -> dict[int, int]:
    """When spans ended, by id: when the first of the two jobs did. Slurm knows that of jobs that ended lately."""
    if not over:
        return {}
    ids = sorted({job for span in over for job in (span.resident_job, span.guest_job)})
    try:
        ended = {job.raw_id: job.end_s for job in slurm.jobs(map(str, ids)) if not job.running and job.end_s}
    except SlurmError as error:
        log.warning("ended-jobs", message=error.what)
        ended = {}
    ends = {}
    for span in over:
        known_s = [ended[job] for job in (span.resident_job, span.guest_job) if job in ended]
        ends[span.id] = int(max(span.start_s, min(min(known_s, default=otherwise_s[span.id]), now_s)))
    return ends
