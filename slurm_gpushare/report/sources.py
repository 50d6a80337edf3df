"""Where figures come from: the store for those who may read it, else what the helper published.

Both answer the same questions. What cannot be known has a note that says why, so that ``---`` never stands alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slurm_gpushare.helper.occupancy import GpuAddress
from slurm_gpushare.helper.reasons import duration_text
from slurm_gpushare.node.figures import run_figures
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.history import sides_by_job
from slurm_gpushare.protocol.record import Record
from slurm_gpushare.report.job_history import History, JobHistory, of_job
from slurm_gpushare.report.status import Activity, Cost, LiveFigures
from slurm_gpushare.slurm.values import array_of
from slurm_gpushare.store.published import NoJobYet, OwnFigures, Published, TokenFigures, read_own, read_public

if TYPE_CHECKING:
    from slurm_gpushare.store.store import Store


class Source(Protocol):
    """What this user may know."""

    note: str
    """Why something is unknown; empty where nothing is."""

    def live(self) -> LiveFigures:
        """Of jobs that are in the queue now."""

    def of_job(self, raw_id: int, key: str, uid: int) -> JobHistory: ...

    def keys(self) -> Mapping[int, str]:
        """What users call the jobs that are in the queue now (6_2), by SLURM_JOB_ID; as of the last `of_job`."""

    def between(self, start_s: float, end_s: float) -> History: ...

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        """What is known of the user's workloads; None if nothing can be."""


def _fresh(directory: Path, now_s: float) -> Published:
    published = read_public(directory)
    age_s = now_s - published.at_s
    if age_s > published.stale_s:
        raise GpushareError(f"the helper last published {duration_text(age_s)} ago")
    return published


class PublishedSource:
    """For users: the helper's files."""

    def __init__(self, directory: Path, uid: int, munge_socket: Path | None) -> None:
        self._directory, self._uid, self._munge_socket = directory, uid, munge_socket
        self._own: OwnFigures | None = None
        self._is_new = False
        self._others = False
        self._live: LiveFigures | None = None
        self._live_note = self.note = ""

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
            published = _fresh(self._directory, time.time())
        except GpushareError as error:
            self.note = f"slow-down and reasons are not known: {error.what}"
            return LiveFigures({}, {})
        jobs = list(published.jobs)
        own = self._read_own() if published.private else None
        if own is not None and time.time() - own.at_s < STAYS_TRUE_S:
            jobs += own.live
        if published.private:
            self.note = "this site hides jobs from each other: only your own are shown with numbers"
        cost = {job.raw_id: Cost(job.expected_isd_pct, job.measured_isd_pct) for job in jobs}
        return LiveFigures({}, cost, jobs={job.key: job for job in jobs}, knowledge=published.knowledge)

    def of_job(self, raw_id: int, key: str, uid: int) -> JobHistory:
        if self._live is None:  # the same for all jobs that are asked about
            self._live = self.live()
            self._live_note = self.note
        self.note = self._live_note
        live = self._live.jobs.get(key)
        own = self._read_own() if uid == self._uid else None
        if own is None:
            if uid != self._uid:
                self.note = "details of a job are for its owner"
            return JobHistory(live=live)
        return JobHistory(
            of_job(own.decisions, raw_id, key),
            [s for s in own.spans if raw_id in (s.resident_job, s.guest_job)],
            own.runs.get(raw_id),
            live,
        )

    def keys(self) -> Mapping[int, str]:
        return {job.raw_id: job.key for job in self._live.jobs.values()} if self._live else {}

    def between(self, start_s: float, end_s: float) -> History:
        if self._others:
            self.note = "what sharing did for other users' jobs is for them and for administrators"
            return History()
        own = self._read_own()
        if own is None:
            return History()
        if start_s < own.since_s:
            since = time.strftime("%Y-%m-%d", time.localtime(own.since_s))
            self.note = f"what sharing cost is known from {since} on"
        return History(
            [s for s in own.spans if s.start_s < end_s and (s.end_s is None or s.end_s > start_s)],
            [d for d in own.decisions if start_s <= d.at_s < end_s],
            own.runs,
            True,
        )

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        own = self._read_own()
        if own is None and self._is_new:  # nothing is hidden: every token of theirs is still to be measured
            self.note = ""
            return {}
        return None if own is None else {item.token: item for item in own.tokens}


STAYS_TRUE_S = 3600.0
"""An owner's file is replaced only when something changes."""


class StoreSource:
    """For administrators: the store, and the helper's file for what only the helper knows."""

    def __init__(self, store: Store, directory: Path) -> None:
        self._directory = directory
        self.store = store
        self._live: LiveFigures | None = None
        self._live_note = self.note = ""

    def live(self) -> LiveFigures:
        figures = read_live(self.store)
        try:
            published = _fresh(self._directory, time.time())
        except GpushareError as error:
            self.note = f"reasons are not known: {error.what}"
            return figures
        return replace(figures, jobs={job.key: job for job in published.jobs}, knowledge=published.knowledge)

    def of_job(self, raw_id: int, key: str, uid: int) -> JobHistory:
        store = self.store
        if self._live is None:  # the same for all jobs that are asked about
            self._live = self.live()
            self._live_note = self.note
        self.note = self._live_note
        record = store.live.of_jobs({raw_id}).get(raw_id)
        runs = sorted(store.runs.of_job(raw_id), key=lambda run: run.by_node)
        if runs:
            record = store.runs.record(runs[-1].id) or record
        return JobHistory(
            of_job(store.decisions.of_jobs({raw_id, array_of(key)}), raw_id, key),
            store.sharing.of_job(raw_id),
            run_figures(record) if record else None,
            self._live.jobs.get(key),
        )

    def keys(self) -> Mapping[int, str]:
        return {job.raw_id: job.key for job in self._live.jobs.values()} if self._live else {}

    def between(self, start_s: float, end_s: float) -> History:
        store = self.store
        spans, decisions = store.sharing.between(start_s, end_s), store.decisions.between(start_s, end_s)
        return History(list(spans), list(decisions), store.runs.figures_between(start_s, end_s), True)

    def tokens(self, uid: int) -> Mapping[str, TokenFigures] | None:
        from slurm_gpushare.helper.publishing import token_figures

        return {item.token: item for item in token_figures(self.store, uid)}


# What the store knows of running jobs: their latest telemetry, and what sharing costs them.


FRESH_S = 120.0


def _activity(record: Record) -> Activity:
    """The job's own share of the card: over its shared time if it ever shared, else alone."""
    period = record.shared if record.neighbours and record.shared.stats else record.alone
    util, memory = period.stats.get("gpu_util_pct"), period.stats.get("gpu_mem_pct")
    return Activity(util.mean if util else None, memory.max if memory else None)


def read_live(store: Store) -> LiveFigures:
    """Interim records younger than two minutes, the spans of sharing that last, and the cards that are off."""
    from slurm_gpushare.store.off_cards import off_cards  # here: users' commands need no database library

    activity = {record.job_id: _activity(record) for record in store.live.since(time.time() - FRESH_S)}
    sides = sides_by_job(store.sharing.open())
    cost = {job: Cost(side.expected_isd_pct, side.measured_isd_pct) for job, side in sides.items()}
    off = {GpuAddress(card.node, card.gpu): card.why for card in off_cards(store)}
    counts = store.counters.all()
    if "cards_won" not in counts and "cards_lost" not in counts:
        return LiveFigures(activity, cost, off=off)
    won, lost, hold_ms = (counts.get(name, 0) for name in ("cards_won", "cards_lost", "hold_ms"))
    return LiveFigures(activity, cost, won, lost, hold_ms / 1000.0, off=off)
