"""What the helper tells users: who is where, what sharing costs, why a job waits; and each owner their own details.

Users have no access to the store. Publishing is a courtesy: when it fails the helper says so once and goes on.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from statistics import fmean

from slurm_gpushare.helper import log
from slurm_gpushare.helper.explain import Code, Reason
from slurm_gpushare.helper.observe import View
from slurm_gpushare.helper.occupancy import place_of
from slurm_gpushare.helper.tick import TickReport
from slurm_gpushare.node.figures import RunFigures, looks_preallocated, run_figures
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import make_open_dir
from slurm_gpushare.protocol.history import OPTED_OUT, SpanSide, last_of_equals, sides_by_job
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import hides_jobs
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.values import array_of
from slurm_gpushare.store.published import (
    OwnFigures,
    PublicJob,
    Published,
    TokenFigures,
    own_text,
    write_own,
    write_public,
)
from slurm_gpushare.store.store import Store

SHARE_OF_TIME = 0.05
"""Most of the helper's time that the file for all may take: a large site gets it less often, but twice in
HeartbeatSeconds, since readers take a helper that publishes nothing for dead."""
OWN_EVERY_S = 30.0
OWN_BUDGET_S = 0.2
"""Time that owners' files may take in one tick; the others have their turn in the next."""
STAYS_S = 600.0
"""An owner whose last job has left is looked at this long: its record comes after the job's end."""
KEPT_S = 31 * 86400.0
MOST_JOBS = 2000
MOST_CACHED = 50_000
PRIVACY_FOR_S = 60.0


class Publisher:
    """Writes the files of `store.published`, never more often than they are worth."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._next_s = self._pause_s = 0.0
        self._private = True
        self._private_at_s = float("-inf")
        self._due: dict[int, float] = {}
        self._seen_s: dict[int, float] = {}
        self._digests: dict[int, bytes] = {}
        self._figures: dict[int, RunFigures] = {}
        self._left: dict[int, dict[int, int]] = defaultdict(dict)
        """When which job of an owner opted out, by uid: its tag is gone, so that the queue does not say so."""
        self._left_read = 0
        self._started = False
        self._complaint = ""

    def publish_now(self) -> None:
        """The next time is now: settings or the knowledge base have changed."""
        self._next_s = 0.0

    def publish(self, report: TickReport, now_s: float, config: Config, knowledge: str = "") -> None:
        """Tell what this tick saw. Never raises: nobody's job depends on it.

        `knowledge` names the bases that the helper runs on.
        """
        if report.view is None:
            return
        try:
            self._look_at_privacy(now_s)
            make_open_dir(config.public_dir)
            live = self._live(report.view, report.reasons)
            if now_s >= self._next_s or self._next_s - now_s > 3600:
                self._for_all(live, report.view, now_s, config, knowledge)
            self._for_owners(live, report.view, now_s, config)
            self._complaint = ""
        except (OSError, GpushareError) as why:
            if str(why) != self._complaint:
                self._complaint = str(why)
                log.warning("publish", error=str(why), hint="PublicDir must belong to SlurmUser.")

    def _look_at_privacy(self, now_s: float) -> None:
        if now_s - self._private_at_s >= PRIVACY_FOR_S or now_s < self._private_at_s:
            self._private, self._private_at_s = hides_jobs(self._slurm.config()), now_s

    def _live(self, view: View, reasons: Mapping[str, Reason]) -> dict[str, PublicJob]:
        """Every job with a tag, by key."""
        where: dict[str, tuple[str, int | None]] = {}
        for card, use in view.cards.items():
            names = [share.job for share in (*use.occupants, *use.coming)]
            for job in names:
                others = [other.raw_id for other in names if other.key != job.key]
                where[job.key] = (place_of(job, card), others[0] if others else None)
        sides = sides_by_job(self._store.sharing.open())
        blind = {f"{gpu.node}:{gpu.index}" for gpu in view.snapshot.gpus if gpu.blind}
        return {
            job.key: _public(job, where.get(job.key, (None, None)), sides.get(job.raw_id), reasons.get(job.key), blind)
            for job in view.jobs.values()
            if job.tag is not None and not job.opted_out
        }

    def _for_all(self, live: Mapping[str, PublicJob], view: View, now_s: float, config: Config, knowledge: str) -> None:
        begun = time.monotonic()
        jobs = tuple(live.values())
        shown = () if self._private else jobs
        alive_s = max(config.heartbeat_s, 2.0 * config.tick_s)
        sums, stale_s = _sums(jobs, view), alive_s + self._pause_s
        host = socket.gethostname()
        write_public(config.public_dir, Published(now_s, self._private, sums, shown, knowledge, host, stale_s))
        self._pause_s = min((time.monotonic() - begun) / SHARE_OF_TIME, config.heartbeat_s / 2.0)
        self._next_s = now_s + self._pause_s

    def _for_owners(self, live: Mapping[str, PublicJob], view: View, now_s: float, config: Config) -> None:
        if not self._started:  # whoever had a job lately may have news
            self._started = True
            lately = {run.token for run in self._store.runs.between(now_s - 86400.0, now_s + 60.0)}
            self._seen_s = dict.fromkeys(self._store.workloads.owners_by_token(lately).values(), now_s)
        self._look_who_left(now_s)
        own: dict[int, list[Job]] = defaultdict(list)
        for key in live:
            own[view.jobs[key].uid].append(view.jobs[key])
        self._seen_s |= dict.fromkeys(own, now_s)
        self._seen_s = {uid: seen_s for uid, seen_s in self._seen_s.items() if now_s - seen_s < STAYS_S}
        begun = time.monotonic()
        for uid in sorted(self._seen_s, key=lambda uid: self._due.get(uid, 0.0)):
            if self._due.get(uid, 0.0) > now_s or time.monotonic() - begun > OWN_BUDGET_S:
                break
            self._due[uid] = now_s + OWN_EVERY_S
            self._for_owner(uid, [live[job.key] for job in own.get(uid, ())], now_s, config)

    def _look_who_left(self, now_s: float) -> None:
        new, self._left_read = self._store.decisions.of_kind(OPTED_OUT, now_s - KEPT_S, self._left_read)
        for decision in new:
            uid = decision.reasons.get("uid")
            if isinstance(uid, int):  # earlier releases did not write it
                own = self._left[uid]
                own[decision.job_id] = decision.at_s
                if len(own) > MOST_JOBS:  # anybody can take job after job out
                    del own[next(iter(own))]
                if now_s - decision.at_s < STAYS_S:
                    self._seen_s[uid] = now_s

    def _for_owner(self, uid: int, live: Collection[PublicJob], now_s: float, config: Config) -> None:
        left = [job for job, at_s in self._left.get(uid, {}).items() if now_s - at_s < KEPT_S]
        figures = own_figures(self._store, uid, live, now_s, self._figures, left)
        if self._private:
            figures = without_neighbours(figures)
        told = own_text(replace(figures, at_s=0.0, since_s=0.0))
        digest = hashlib.sha256(f"{config.public_dir}\n{told}".encode()).digest()
        if self._digests.get(uid) != digest:
            write_own(config.public_dir, uid, own_text(figures), config.munge_socket)
            self._digests[uid] = digest


def _public(
    job: Job,
    place: tuple[str | None, int | None],
    side: SpanSide | None,
    reason: Reason | None,
    blind: Collection[str],
) -> PublicJob:
    if job.paused:  # by us; of a job that its administrator suspended Slurm's own state says enough
        reason = Reason(Code.PAUSED)
    return PublicJob(
        key=job.key,
        raw_id=job.raw_id,
        card=place[0],
        beside=place[1],
        expected_isd_pct=_finite(side.expected_isd_pct) if side else None,
        measured_isd_pct=_finite(side.measured_isd_pct) if side else None,
        reason=reason.code.value if reason else None,
        need=_finite(reason.need) if reason else None,
        have=_finite(reason.have) if reason else None,
        wait_s=_finite(reason.wait_s) if reason else None,
        paused=job.paused,
        blind=place[0] in blind,
        given_back_s=int(job.given_s),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or value != value or abs(value) >= 1e9 else round(value, 1)


def _sums(jobs: Collection[PublicJob], view: View) -> dict[str, float]:
    """What may be said where single jobs may not: how many, and how much on average."""
    states = [view.jobs[job.key].state for job in jobs]
    measured = [job.measured_isd_pct for job in jobs if job.measured_isd_pct is not None]
    sums: dict[str, float] = {
        "jobs": len(jobs),
        "running": sum(state == "RUNNING" for state in states),
        "pending": sum(state == "PENDING" for state in states),
        "paused": sum(job.paused for job in jobs),
        "sharing": sum(job.expected_isd_pct is not None for job in jobs),
        "measured": len(measured),
    }
    if measured:
        sums["measured_isd_mean_pct"] = round(fmean(measured), 1)
    return sums


def own_figures(
    store: Store,
    uid: int,
    live: Collection[PublicJob],
    now_s: float,
    cache: dict[int, RunFigures],
    left: Collection[int] = (),
) -> OwnFigures:
    """What the store knows of one user's jobs of the last month; `cache` keeps ended runs' figures by their id.

    `left` are the jobs that the user took out of sharing.
    """
    since_s = now_s - KEPT_S
    tokens = store.workloads.of_owner(uid)
    runs = [run for run in store.runs.of_tokens(tokens, MOST_JOBS) if run.end_s >= since_s]
    records = store.live.of_jobs({job.raw_id for job in live})
    figures = {job: run_figures(record) for job, record in records.items()}
    if len(cache) > MOST_CACHED:
        cache.clear()
    for run in runs:
        if run.id not in cache and (record := store.runs.record(run.id)) is not None:
            cache[run.id] = run_figures(record)
        if run.id in cache and (run.by_node or run.job_id not in figures):
            figures[run.job_id] = cache[run.id]
    jobs = {run.job_id: uid for run in runs} | {job.raw_id: uid for job in live}
    spans = store.sharing.of_jobs(store.jobs.periods(jobs), since_s)
    told = store.jobs.periods(jobs | {array_of(job.key): uid for job in live} | dict.fromkeys(left, uid))
    return OwnFigures(
        at_s=now_s,
        since_s=since_s,
        live=tuple(live),
        spans=tuple(replace(span, resident_token="", guest_token="") for span in spans),
        decisions=tuple(last_of_equals(store.decisions.of_jobs(told))),
        runs=figures,
        tokens=tuple(token_figures(store, uid)),
    )


def token_figures(store: Store, uid: int) -> Iterator[TokenFigures]:
    """What is known of a user's workloads, with their latest jobs."""
    tokens = store.workloads.of_owner(uid)
    profiles, latest = store.profiles.of(tokens), store.runs.of_tokens(tokens, MOST_JOBS)
    last_s = {run.token: int(run.end_s) for run in latest}
    jobs: dict[str, dict[int, None]] = defaultdict(dict)
    for run in latest:
        if run.by_node:
            jobs[run.token][run.job_id] = None
    for token, created_s in sorted(tokens.items()):
        profile = profiles.get(token)
        last_used_s = last_s.get(token, profile.updated_s if profile else created_s)
        if profile is None:
            yield TokenFigures(token, last_used_s=last_used_s, jobs=tuple(jobs[token]))
        else:
            size = (profile.duration_s, profile.mem_used_mib, profile.gpu_model)
            memory = profile.features.get("mgmap"), profile.features.get("gpu_mem_pct_mean")
            looks = looks_preallocated(*memory)
            yield TokenFigures(token, profile.runs, profile.cluster, *size, last_used_s, looks, tuple(jobs[token]))


def without_neighbours(figures: OwnFigures) -> OwnFigures:
    """The same without other people's job ids: Slurm hides them there."""
    own = set(figures.runs) | {job.raw_id for job in figures.live}
    spans = tuple(
        replace(
            span,
            resident_job=span.resident_job if span.resident_job in own else 0,
            guest_job=span.guest_job if span.guest_job in own else 0,
        )
        for span in figures.spans
    )

    def alone(job: PublicJob) -> PublicJob:
        return job if job.beside in own else replace(job, beside=None)

    decisions = tuple(d if d.partner_job in own else replace(d, partner_job=None) for d in figures.decisions)
    hidden = tuple(replace(d, reasons={k: v for k, v in d.reasons.items() if k != "why"}) for d in decisions)
    return replace(figures, live=tuple(map(alone, figures.live)), spans=spans, decisions=hidden)
