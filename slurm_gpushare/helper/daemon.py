"""``gpushare backfill``: what the helper does when, around the `Loop`.

Events are *tick due*, *job ended*, *record came* and *settings changed*; each is a task of its own, beside those that
tell nodes, hook and users, and those that look after the store.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from slurm_gpushare.helper import log
from slurm_gpushare.helper.hold import BEAT_S, Answerer, show_jobs
from slurm_gpushare.helper.housekeeping import AccountedTokens, Housekeeping, job_tokens, make_ingest
from slurm_gpushare.helper.learner import SiteKnowledge
from slurm_gpushare.helper.lease import RENEW_EVERY_S, Lease, Lock
from slurm_gpushare.helper.loop import Loop, Work, at_once
from slurm_gpushare.helper.preemption import PATIENCE_S
from slurm_gpushare.helper.promises import tell_nodes
from slurm_gpushare.helper.publishing import Publisher
from slurm_gpushare.helper.tick import Helper, TickReport
from slurm_gpushare.node.delivery import NODES
from slurm_gpushare.protocol.errors import ConfigError, GpushareError
from slurm_gpushare.protocol.files import Stamps, stamps
from slurm_gpushare.protocol.history import ERRORS
from slurm_gpushare.protocol.release import is_stale
from slurm_gpushare.protocol.settings import Config, generated_path, load_config
from slurm_gpushare.protocol.settings_in_force import remember
from slurm_gpushare.protocol.stop_orders import RENEW_S
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import SlurmUser, completing_stops_everybody, hides_jobs, missing_for_gangs, slurm_user
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store, StoreReplaced
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.ingest import Ingest

LOOK_S = 0.25
"""How often the times of spool and slurmctld's saved state are looked at: they change when a record or a job does."""
REST = 2.0
"""Wait at least this many times as long as the last tick took: slurmctld and the helper's host get a rest."""
REST_BEFORE_NEWS = 5.0
"""The same for news, which cannot shorten a tick's time further than to this."""
LEAST_S = 1.0
"""Between two ticks, or two looks into the spool, whatever happens."""
FINISH_S = 20.0
"""A tick that is under way when we are told to stop has so long to end."""
SLURM_CONF_FOR_S = 600.0
LOCK_EVERY_S = 10.0
LEARN_S, LEARN_EVERY_S = 0.05, 0.2
"""Of a long past, of which the store has no lessons yet, so much is learned from at once, and so often."""
UPKEEP_S = 60.0


def rest_s(tick_s: float, took_s: float, heartbeat_s: float) -> tuple[float, float]:
    """How long to wait after a tick that took so long, and at least where there is news.

    A tick may have been long because the helper stood still or slurmctld did not answer: resting in proportion to that
    it would be taken for dead.
    """
    longest_s = max(tick_s, min(REST * took_s, heartbeat_s / 4.0))
    return longest_s, min(longest_s, max(LEAST_S, REST_BEFORE_NEWS * took_s))


class Daemon:
    """The helper as a process. Its death costs only sharing: jobs carry their own undoing."""

    def __init__(self, config: Config, slurm: Slurm, store: Store, *, policy: str | None = None, dry_run: bool = False):
        self._slurm, self._store, self._dry_run = slurm, store, dry_run
        self._lock: Lock | None = None
        self._lease: Lease | None = None
        self._tags = job_tokens(slurm, store)
        self._knowledge = SiteKnowledge(store, config.gpu_models, writes=not dry_run)
        partners = self._knowledge.learners[0].partners
        self._helper = Helper(config, slurm, store, self._knowledge, policy=policy, partners=partners, dry_run=dry_run)
        self.faults = self._helper.faults
        self._publisher = Publisher(store, slurm)
        self._housekeeping = Housekeeping(store)
        self._accounted = AccountedTokens(store, slurm)
        self._answerer: Answerer | None = None
        self._reopen = self._lost = self._told_to_stop = False
        self._ticks = 0
        self._changed = True
        """Whether the hook's file must follow now."""
        self._to_learn = True
        self._unreported: Counter[str] = Counter()
        self._claimed: set[str] = set()
        self._beaten_s = 0.0
        self._report: TickReport | None = None
        self._news: Stamps = ()
        self._read_stamp = stamps(_files(config))
        self._slurm_conf: Mapping[str, str] = {}
        self._take(config, *self._build(config, at_start=True))
        self._make_tasks()

    def _make_tasks(self) -> None:
        self._loop = Loop(self.faults, self._on_fault)
        task = self._loop.task
        self._answers = task("answer", self._answer)
        self._orders = task("stops", self._tell_nodes)
        self._tick = task("tick", self._one_tick, lambda: self._rest_s[0])
        self._settings = task("reload", self._take_settings)
        self._site = task("site", self._look_at_site, lambda: SLURM_CONF_FOR_S)
        self._beats = task("hold", self._show_board, lambda: BEAT_S)
        self._records = task("records", self._take_records, lambda: self._config.tick_s)
        self._beat_task = task("beat", self._beat)
        self._publishing = task("publish", self._publish)
        self._looks = task("news", self._look_for_news, lambda: LOOK_S)
        self._lessons = task("lessons", self._learn_on)
        self._upkeep = task("store", self._look_after_store, lambda: UPKEEP_S, quiet=True)
        self._guard = task("lock", self._look_at_lock, lambda: LOCK_EVERY_S)
        self._leases = task("lease", self._renew_lease, lambda: RENEW_EVERY_S)

    def _build(self, config: Config, at_start: bool = False) -> tuple[HookFile, Ingest]:
        """All that is made from settings; ConfigError, before any of them counts, if something cannot be made."""
        ingest = make_ingest(config, self._store, self._tags, known_users_only=at_start)
        return HookFile(config.hook_file, config.gpu_models), ingest

    def _take(self, config: Config, hook_file: HookFile, ingest: Ingest) -> None:
        before = getattr(self, "_hook_file", hook_file)
        hook_file.gangs, hook_file.stale = before.gangs, before.stale
        self._config, self._hook_file, self._ingest = config, hook_file, ingest
        self._knowledge.site_models = config.gpu_models
        self._helper.configure(config)
        self._apply_slurm_conf()

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._config

    @property
    def _rest_s(self) -> tuple[float, float]:
        longest_s, least_s = rest_s(self._config.tick_s, self._tick.took_s, self._config.heartbeat_s)
        if self._helper.state.watch.pauses.jobs:  # orders must be renewed
            longest_s = min(longest_s, RENEW_S)
        if self._helper.state.preemptors.urgent:
            longest_s = min(longest_s, PATIENCE_S)
        return longest_s, min(least_s, longest_s)

    def once(self) -> TickReport:
        """One tick, everything included, and nothing beside it. Raises what went wrong."""
        at_once(self._all_once())
        assert self._report is not None
        if (fault := self.faults.first) is not None:
            self.faults.first = None
            raise fault
        return self._report

    async def _all_once(self) -> None:
        if not self._slurm_conf and not self._dry_run:
            await self._look_at_site()
        if not self._dry_run:
            jobs, asked_s = await self._read_queue()
            await self._take_records()
            await self._one_tick(jobs, asked_s)
            await self._tell_nodes()
            if self._beat_is_due:
                await self._beat()
            await self._look_after_store()
            await self._publish()
        else:
            await self._one_tick()

    def run(self, lock: Lock | None = None, lease: Lease | None = None) -> bool:
        """Tick until SIGTERM or SIGINT; the tick that is under way is finished.

        False if all must be read anew: the store's file is another one now, or another helper has the `lease`. Raises
        GpushareError if the `lock` is lost: another helper may be at work.
        """
        self._lock, self._lease = lock, lease
        aio = self._loop.open()
        for number, heard in ((signal.SIGTERM, self._stop), (signal.SIGINT, self._stop),
                              (signal.SIGHUP, self._settings.want),
                              (signal.SIGUSR1, partial(self._tick.want, urgent=True))):  # fmt: skip
            aio.add_signal_handler(number, heard)
        log.info("start", pid=os.getpid(), backend=self._slurm.name, policy=self._helper.settings.policy,
                 knowledge=self._knowledge.titles, dry_run=self._dry_run or None)  # fmt: skip
        for first in (self._leases, self._site, self._records, self._looks, self._upkeep, self._guard):
            if not self._dry_run or first is self._looks:
                first.want()
        self._tick.want(0.1)  # after the records that wait
        try:
            aio.run_until_complete(self._until_over())
        finally:
            self._loop.close(*self._last_words())
            if self._answerer is not None:
                self._answerer.pipe.close()
        if self._lost:
            raise GpushareError("the helper's lock is gone", "Another helper may have it: look for one.")
        if not self._told_to_stop and (self._reopen or (lease is not None and not lease.number)):
            return False
        log.info("stop", ticks=self._ticks)
        return True

    def _stop(self) -> None:
        self._told_to_stop = True
        self._loop.over.set()

    async def _until_over(self) -> None:
        await self._loop.over.wait()
        if self._tick.doing is not None and not self._reopen:
            await asyncio.wait([self._tick.doing], timeout=FINISH_S)

    def _last_words(self) -> Iterator[Work[None]]:
        """So that the hook gives no lease that nobody would end, and no node keeps a card or a job for nobody."""
        if self._lease is not None and not self._lease.number:
            return  # nodes and hook listen to another one
        if not self._dry_run:
            yield Work(self._helper.let_all_go)
        if self._answerer is not None:
            yield Work(self._answerer.say_goodbye)
        if not self._dry_run and not self._reopen:
            yield Work(self._hook_file.beat, 0)

    # Events.

    async def _one_tick(self, jobs: list[Job] | None = None, asked_s: float = 0.0) -> None:
        """Tick due: look at the queue and act on it."""
        if jobs is None:
            jobs, asked_s = await self._read_queue()
        with self.faults.contained("learn", StoreReplaced):
            self._learn()
        report = await self._helper.look(jobs, asked_s)
        report.calls += 1
        self._report = report
        self._ticks += 1
        self._unreported += Counter(ticks=1, tick_ms=round(1000 * report.total_s))
        if report.outcomes or self._ticks % 60 == 1:
            log.info(
                "tick", jobs=report.jobs, pending=report.pending, pairs=report.pairs, calls=report.calls,
                plan_ms=1000 * report.plan_s, ms=1000 * report.total_s, **report.outcomes,
            )  # fmt: skip
        if not self._dry_run:
            self._publishing.want()
            if self._beat_is_due:
                self._beat_task.want()
            if self._helper.orders:
                self._orders.want()
            if self._answerer is not None:
                self._beats.want()

    async def _read_queue(self) -> tuple[list[Job], float]:
        asked_s = time.monotonic()
        jobs = await Work(self._slurm.jobs)
        if not self._dry_run:
            self._tags.take(jobs)
            await self._claim(jobs)
        self._compare_releases(str(await Work(lambda: self._slurm.release)))
        return jobs, asked_s

    async def _claim(self, jobs: list[Job]) -> None:
        """A token belongs to whoever submitted with it first, not to whose job ends first."""
        tagged = [job for job in jobs if job.tag and job.tag.token and job.tag.token not in self._claimed]
        claims = {job.tag.token: job.uid for job in sorted(tagged, key=_latest_first) if job.tag and job.tag.token}
        if claims:
            await Work(self._store.workloads.claim, claims)
        self._claimed = {job.tag.token for job in jobs if job.tag and job.tag.token}

    async def _take_records(self) -> None:
        """Record came: take it in. The next tick learns from it."""
        summary = await Work(self._ingest.run, time.time())
        if any(summary.counts.values()):
            self._changed = self._to_learn = True

    def _learn(self) -> None:
        """Bring what is known up to date: never while an answer is worked out by it."""
        if self._to_learn and not self._answers.doing:
            self._knowledge.catch_up(math.inf if self._loop.aio is None else LEARN_S)
            self._to_learn = self._knowledge.behind
        if self._to_learn:
            self._lessons.want(LEARN_EVERY_S)

    async def _learn_on(self) -> None:
        """What a tick had no time for; between ticks, which plan by what is known."""
        if self._tick.doing:
            self._lessons.want(LEARN_EVERY_S)
        else:
            self._learn()

    async def _answer(self) -> None:
        """Jobs ended: somebody gets their cards."""
        if self._answerer is not None:
            await self._answerer.answer_all()

    async def _take_settings(self) -> None:
        """Settings changed: they count once all that is made from them has been made; nothing else changes."""
        self._read_stamp = await Work(stamps, _files(self._config))  # first: a change while we read is read again
        try:
            config = await Work(load_config, self._config.source)
            built = await Work(self._build, config)
        except ConfigError as error:
            log.warning("reload", error=str(error), kept="the settings in force")
            return
        if config.store_url != self._config.store_url:
            log.warning("reload", error="StoreUrl changed: restart the helper")
        self._take(config, *built)
        self._changed = True
        await Work(remember, config)
        self._take_bases()
        self._publisher.publish_now()
        self._site.want()
        self._tick.want()
        log.info("reload", policy=self._helper.settings.policy)

    async def _look_for_news(self) -> None:
        """Something that costs no request, and that no user can make happen, says that a record or a job has come."""
        saved = Path(self._slurm_conf.get("StateSaveLocation", os.devnull)) / "job_state"
        news = await Work(stamps, (self._config.spool_dir / NODES, saved))
        before, self._news = self._news or news, news
        if news[0] != before[0] and not self._dry_run:
            self._records.want(LEAST_S)
        if news != before:
            self._tick.want(0.0 if self._tick.doing else self._rest_s[1])
        if await Work(stamps, _files(self._config)) != self._read_stamp:
            self._settings.want()

    # What Slurm is set up for.

    async def _look_at_site(self) -> None:
        self._slurm_conf = await Work(self._slurm.config)
        release = await Work(lambda: self._slurm.release)
        if self._ticks == 0:
            _check_user(slurm_user(self._slurm_conf))
            log.info("slurm", release=release)
        self._apply_slurm_conf()
        if self._slurm_conf and not self._dry_run:
            await Work(show_jobs, self._config.spool_dir, hides_jobs(self._slurm_conf))
        if self._loop.aio is not None:
            await self._answer_holds(self._loop.aio)

    def _apply_slurm_conf(self) -> None:
        """What of our settings this Slurm is set up for; the rest is done without."""
        slurm_conf = self._helper.state.site.slurm_conf = self._slurm_conf
        if not slurm_conf:
            return
        missing = missing_for_gangs(slurm_conf)
        possible = not missing and self._slurm.release.can("keeps_whole_gpus_apart")
        self._hook_file.gangs = self._config.share_gangs and possible
        if self._config.share_gangs and not possible:
            why = f"SelectTypeParameters lacks {', '.join(missing)}" if missing else f"Slurm {self._slurm.release}"
            log.warning("gangs", error=f"{why}: jobs that want a whole node run as written")

    def _compare_releases(self, running: str) -> None:
        """Tell the hook where configure knew another Slurm than the one that runs."""
        stale = is_stale(self._config.slurm_version, self._slurm.release)
        if stale == self._hook_file.stale:
            return
        self._hook_file.stale = stale
        self._changed = True
        if stale:
            log.warning("slurm-version", configured=self._config.slurm_version, running=running,
                        hint="No job is converted until 'gpushare configure --write' has run again.")  # fmt: skip

    async def _answer_holds(self, aio: asyncio.AbstractEventLoop) -> None:
        """Answer the nodes' holds where there are any, and where it was said so by the settings in force."""
        config = self._config
        wanted = bool(config.epilog_hold_s) and not self._dry_run and not self._helper.places_nobody
        if wanted and completing_stops_everybody(self._slurm_conf):
            wanted = False
            log.warning("hold", error="CompleteWait without reduce_completing_frag: no hold",
                        hint="A job in its epilog would keep all other jobs waiting too.")  # fmt: skip
        places = (config.spool_dir, config.state_dir) if wanted else None
        before = self._answerer
        if before is not None and before.places != places:
            self._answerer = None
            aio.remove_reader(before.pipe.handle)
            before.pipe.close()
            await Work(before.say_goodbye)
        if places is not None and self._answerer is None:
            self._answerer = await Work(Answerer, self._helper, self._slurm, config)
            aio.add_reader(self._answerer.pipe.handle, self._on_ended)
            self._beats.want()

    async def _tell_nodes(self) -> None:
        """Who must stand still: an order that is not renewed lapses."""
        await Work(self._if_in_charge, tell_nodes, self._config, self._store, self._helper.orders)

    def _if_in_charge(self, do: Callable[..., None], *values: object) -> None:
        """NotInCharge, and nothing is done, if it is not for us to do."""
        self._slurm.before_change()
        do(*values)

    async def _show_board(self) -> None:
        if self._answerer is not None:
            await self._answerer.publish()

    async def _look_at_lock(self) -> None:
        if self._lock is not None and not await Work(self._lock.is_held):
            self._lost = True
            self._loop.over.set()

    async def _renew_lease(self) -> None:
        if self._lease is not None and (held := await Work(self._lease.look)) is not None:
            log.warning("lease", lost=True, holder=held.host or None)
            self._loop.over.set()

    # What others are told.

    async def _beat(self) -> None:
        """Tell the hook that we are alive, and what is new; only after a tick that worked."""
        now_s, changed = time.time(), self._changed
        counts, self._unreported, self._changed = self._unreported, Counter(), False
        counts.update(self._helper.state.handovers.drain())
        counts.update({f"{ERRORS}{kind}": count for kind, count in self.faults.counts.items()})
        self.faults.counts.clear()
        written = False
        try:
            await Work(self._if_in_charge, self._write_beat, now_s, dict(counts))
            written = True
        finally:
            if not written:  # told with the next one
                self._unreported.update(counts)
                self._changed = self._changed or changed
        self._beaten_s = now_s

    @property
    def _beat_is_due(self) -> bool:
        age_s = time.time() - self._beaten_s
        return self._changed or not 0.0 <= age_s < min(10.0, self._config.heartbeat_s / 4)

    def _write_beat(self, now_s: float, counts: Mapping[str, int]) -> None:
        self._store.live.beat("helper", now_s)
        # The first time all of it: what the file follows may have been another store until now.
        self._hook_file.sync(self._store, now_s, anew=not self._beaten_s)
        self._store.counters.add(counts)

    async def _publish(self) -> None:
        if self._report is not None:
            await Work(self._publisher.publish, self._report, time.time(), self._config, self._knowledge.titles)

    async def _look_after_store(self) -> None:
        """What is old is forgotten, and damage looked for; at a lower priority."""
        await Work(self._housekeeping.look_after, self._config.keep_days, time.time())
        await Work(self._accounted.take_out, self._config.keep_days, time.time())

    # Faults and signals.

    def _on_fault(self, error: Exception) -> None:
        if isinstance(error, StoreReplaced) and not self._reopen:
            self._reopen = self._has_store_again()
            if self._reopen:
                self._loop.over.set()

    def _has_store_again(self) -> bool:
        """Whether there is a store to go on with; one that was deleted is written anew from what is still open."""
        try:
            if self._store.database.put_back():
                log.warning("store", message="it was deleted, and is back with all that was in it")
        except GpushareError as error:
            log.warning("store", error=str(error))
            return False
        return True

    def _take_bases(self) -> None:
        """Start from the knowledge bases in force now."""
        with self.faults.contained("knowledge", StoreReplaced):
            if self._knowledge.take_bases():
                self._helper.partners = self._knowledge.learners[0].partners
                self._helper.configure(self._config)
                log.info("reload", knowledge=self._knowledge.titles)

    def _on_ended(self) -> None:
        if self._answerer is not None:
            self._answerer.hear()
            self._answers.want()


def _files(config: Config) -> tuple[Path, ...]:
    """gpushare.conf and the file beside it."""
    return (config.source, generated_path(config.source)) if config.source else ()


def _latest_first(job: Job) -> tuple[int, int]:
    return -job.submit_s, -job.raw_id


def _check_user(wanted: SlurmUser) -> None:
    if os.geteuid() not in {0, wanted.uid} and wanted.uid is not None:
        log.warning("user", error=f"the helper must run as SlurmUser {wanted.name}({wanted.uid}) to change jobs")
