"""Where figures come from: the store for those who may read it, else what the helper published.

Both answer the same questions. What cannot be known has a note that says why, so that ``---`` never stands alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.node.figures import run_figures
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.history import of_job, sides_by_job
from slurm_gpushare.protocol.record import Record
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.text import duration_text, moment
from slurm_gpushare.report.job_view import History
from slurm_gpushare.report.summary import Report, summarise
from slurm_gpushare.slurm.accounting import AccountedJob, AccountingQuery
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.values import array_of
from slurm_gpushare.store.published import (
    NoJobYet,
    OwnFigures,
    PublicJob,
    Published,
    TokenFigures,
    read_own,
    read_public,
)

if TYPE_CHECKING:  # a login node has no database library
    from slurm_gpushare.store.store import Store

Pair = tuple[float | None, float | None]
STAYS_TRUE_S = 3600.0
"""An owner's file is replaced only when something changes."""
FRESH_S = 120.0
"""An interim record that is older says nothing of now."""


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What is known now besides Slurm's tables."""

    activity: Mapping[int, Pair] = field(default_factory=dict)
    """GPU utilisation and memory in per cent, by SLURM_JOB_ID; for those who may read the store."""
    cost: Mapping[int, Pair] = field(default_factory=dict)
    """What sharing costs while it lasts: expected and measured slow-down in per cent, by SLURM_JOB_ID."""
    jobs: Mapping[str, PublicJob] = field(default_factory=dict)
    """What the helper published, by key."""
    holds: tuple[int, int, float] | None = None
    """Of cards that became empty with one of our jobs next in the queue, ever since: how many the helper gave to it,
    how many it lost to Slurm, and for how many seconds nodes have kept them in all."""
    knowledge: str = ""
    """The knowledge bases that the helper runs on; empty where that is not known."""
    host: str = ""
    """Where the helper that is in charge runs; empty where that is not known."""
    off: Mapping[GpuAddress, str] = field(default_factory=dict)
    """Cards that an administrator has taken out of sharing, and why; for those who may read the store."""


def _fresh(directory: Path) -> Published:
    published = read_public(directory)
    age_s = time.time() - published.at_s
    if age_s > published.stale_s:
        raise GpushareError(f"the helper last published {duration_text(age_s)} ago")
    return published


class Source:
    """What this user may know. What is in the queue is asked for once for all the jobs of a command."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._live: LiveFigures | None = None
        self._live_note = self.note = ""
        """`note`: why something is unknown; empty where nothing is."""

    def live(self) -> LiveFigures:
        """Of jobs that are in the queue now."""
        raise NotImplementedError

    def of_job(self, raw_id: int, key: str, uid: int) -> History:
        """All of one job."""
        raise NotImplementedError

    def between(self, start_s: float, end_s: float) -> History:
        """Of all jobs of a period."""
        raise NotImplementedError

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        """What is known of the user's workloads; None if nothing can be."""
        raise NotImplementedError

    def keys(self) -> Mapping[int, str]:
        """What users call the jobs that are in the queue now (6_2), by SLURM_JOB_ID; as of the last `of_job`."""
        return {job.raw_id: job.key for job in self._live.jobs.values()} if self._live else {}

    def _now(self) -> LiveFigures:
        if self._live is None:
            self._live = self.live()
            self._live_note = self.note
        self.note = self._live_note
        return self._live


class PublishedSource(Source):
    """For users: the helper's files."""

    def __init__(self, directory: Path, uid: int, munge_socket: Path | None) -> None:
        super().__init__(directory)
        self._uid, self._munge_socket = uid, munge_socket
        self._own: OwnFigures | None = None
        self._is_new = self._others = False

    def ask_about(self, uids: Collection[int]) -> None:
        """Whose jobs the report is of, none: everybody's. Of other users' nothing was published for this one."""
        self._others = set(uids) != {self._uid}

    def _read_own(self) -> OwnFigures | None:
        if self._own is None:
            try:
                self._own = read_own(self._directory, self._uid, self._munge_socket)
            except GpushareError as error:
                self._is_new = isinstance(error, NoJobYet)
                self.note = f"what sharing did is not known: {error.what}"
        return self._own

    def live(self) -> LiveFigures:
        try:
            published = _fresh(self._directory)
        except GpushareError as error:
            self.note = f"slow-down and reasons are not known: {error.what}"
            return LiveFigures()
        jobs = list(published.jobs)
        own = self._read_own() if published.private else None
        if own is not None and time.time() - own.at_s < STAYS_TRUE_S:
            jobs += own.live
        if published.private:
            self.note = "this site hides jobs from each other: only your own are shown with numbers"
        cost = {job.raw_id: (job.expected_isd_pct, job.measured_isd_pct) for job in jobs}
        return LiveFigures(cost=cost, jobs={job.key: job for job in jobs})

    def of_job(self, raw_id: int, key: str, uid: int) -> History:
        live = self._now().jobs.get(key)
        own = self._read_own() if uid == self._uid else None
        if own is None:
            if uid != self._uid:
                self.note = "details of a job are for its owner"
            return History(live=live)
        spans = [s for s in own.spans if raw_id in (s.resident_job, s.guest_job)]
        return History(spans, of_job(own.decisions, raw_id, key, array_of(key)), own.runs, True, live)

    def between(self, start_s: float, end_s: float) -> History:
        if self._others:
            self.note = "what sharing did for other users' jobs is for them and for administrators"
            return History()
        own = self._read_own()
        if own is None:
            return History()
        if start_s < own.since_s:
            self.note = f"what sharing cost is known from {moment(own.since_s, '%Y-%m-%d')} on"
        spans = [s for s in own.spans if s.start_s < end_s and (s.end_s is None or s.end_s > start_s)]
        return History(spans, [d for d in own.decisions if start_s <= d.at_s < end_s], own.runs, True)

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        own = self._read_own()
        if own is None and self._is_new:  # nothing is hidden: every token of theirs is still to be measured
            self.note = ""
            return {}
        return None if own is None else {item.token: item for item in own.tokens}


class StoreSource(Source):
    """For administrators: the store, and the helper's file for what only the helper knows."""

    def __init__(self, store: Store, directory: Path) -> None:
        super().__init__(directory)
        self.store = store

    def live(self) -> LiveFigures:
        """Interim records younger than two minutes, the spans that last, and what the helper published."""
        store = self.store
        counts = store.counters.all()
        holds = (counts.get("cards_won", 0), counts.get("cards_lost", 0), counts.get("hold_ms", 0) / 1000.0)
        figures = LiveFigures(
            {record.job_id: _activity(record) for record in store.live.since(time.time() - FRESH_S)},
            {job: (s.expected_isd_pct, s.measured_isd_pct) for job, s in sides_by_job(store.sharing.open()).items()},
            holds=holds if holds[:2] != (0, 0) else None,
            off={GpuAddress(card.node, card.gpu): card.why for card in store.knowledge.off_cards()},
        )
        try:
            published = _fresh(self._directory)
        except GpushareError as error:
            self.note = f"reasons are not known: {error.what}"
            return figures
        shown = {job.key: job for job in published.jobs}
        return replace(figures, jobs=shown, knowledge=published.knowledge, host=published.host)

    def of_job(self, raw_id: int, key: str, uid: int) -> History:
        store, live = self.store, self._now().jobs.get(key)
        record = store.live.of_jobs({raw_id}).get(raw_id)
        periods = store.jobs.periods({raw_id: uid, array_of(key): uid})
        runs = sorted(store.runs.of_job(raw_id, periods[raw_id]), key=lambda run: (run.by_node, run.end_s))
        if runs and (record is None or record.end_s <= runs[-1].end_s):  # else it was requeued, and runs again
            record = store.runs.record(runs[-1].id) or record
        decisions = of_job(store.decisions.of_jobs(periods), raw_id, key, array_of(key))
        figures = {raw_id: run_figures(record)} if record else {}
        return History(store.sharing.of_jobs({raw_id: periods[raw_id]}), decisions, figures, True, live)

    def between(self, start_s: float, end_s: float) -> History:
        store = self.store
        spans, decisions = store.sharing.between(start_s, end_s), store.decisions.between(start_s, end_s)
        runs = store.runs.figures_between(start_s, end_s)
        return History(list(spans), list(decisions), runs, True, jobs=store.jobs.between(start_s, end_s))

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        from slurm_gpushare.helper.publishing import token_figures

        return {item.token: item for item in token_figures(self.store, uid)}


def _activity(record: Record) -> Pair:
    """The job's own share of the card: over its shared time if it ever shared, else alone."""
    part = record.shared if record.neighbours and record.shared.stats else record.alone
    util, memory = part.stats.get("gpu_util_pct"), part.stats.get("gpu_mem_pct")
    return (util.mean if util else None, memory.max if memory else None)


# A report: one sacct call, one squeue if jobs still run, three queries.


def collect(
    slurm: Slurm, source: Source, period: tuple[datetime, datetime], query: AccountingQuery, config: Config
) -> Report:
    """The report of `period`, local time, on the jobs of `query`. What `source` does not know is told as unknown."""
    start_s, end_s = (moment.timestamp() for moment in period)
    start, end = (moment.strftime("%Y-%m-%dT%H:%M:%S") for moment in period)
    found = slurm.accounting(replace(query, start=start, end=end))
    jobs = (job for job in _with_tags(slurm, found) if job.gpus or job.shards or job.tag)
    known = source.between(start_s, end_s)
    return summarise(jobs, known, config.promises, start_s, end_s, config.shards_per_gpu)


def _with_tags(slurm: Slurm, jobs: Sequence[AccountedJob]) -> Sequence[AccountedJob]:
    """Accounting gets a job's comment when the job ends: until then its tag is in the queue."""
    if all(job.tag or job.end_s is not None for job in jobs):
        return jobs
    try:
        tags = {job.raw_id: job.tag for job in slurm.jobs() if job.tag}
    except SlurmError:
        return jobs  # a report of the past needs no slurmctld
    return [job if job.tag else replace(job, tag=tags.get(job.raw_id)) for job in jobs]
