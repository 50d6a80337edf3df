"""``gpushare backfill``: ticks, signals, lock and heartbeat around the `Helper`."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType

from slurm_gpushare.helper import log
from slurm_gpushare.helper.answering import Answerer
from slurm_gpushare.helper.events import Wakeup, watched_paths
from slurm_gpushare.helper.housekeeping import Housekeeping, make_ingest
from slurm_gpushare.helper.publishing import Publisher
from slurm_gpushare.helper.site_knowledge import SiteKnowledge
from slurm_gpushare.helper.tick import Helper, TickReport
from slurm_gpushare.protocol.errors import ConfigError, GpushareError
from slurm_gpushare.protocol.files import hand_over
from slurm_gpushare.protocol.release import is_stale
from slurm_gpushare.protocol.settings import Config, generated_path, load_config
from slurm_gpushare.protocol.settings_in_force import remember
from slurm_gpushare.protocol.stop_orders import RENEW_S
from slurm_gpushare.slurm.accounting import JobTokens
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.nodes import SlurmUser, completing_stops_everybody, missing_for_gangs, slurm_user
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.store import Store, StoreReplaced
from slurm_gpushare.store.hookfile import HookFile

LONGEST_PAUSE_S = 30.0
"""After failures. Not longer: until the next tick nobody shares."""


class Daemon:
    """The helper as a process. Its death costs only sharing: jobs carry their own undoing."""

    def __init__(self, config: Config, slurm: Slurm, store: Store, *, policy: str | None = None, dry_run: bool = False):
        self._slurm = slurm
        self._store = store
        self._dry_run = dry_run
        self._tags = JobTokens(slurm)
        self._knowledge = SiteKnowledge(store, config.gpu_models, writes=not dry_run)
        first = self._knowledge.learners[0]
        self._helper = Helper(
            config,
            slurm,
            store,
            self._knowledge,
            policy=policy,
            partners=first.partners,
            dry_run=dry_run,
        )
        self._publisher = Publisher(store, slurm)
        self._stop = self._reload = self._nudged = False
        self._ticks = 0
        self._unreported = {"ticks": 0, "tick_ms": 0}
        self._claimed: set[str] = set()
        self._beaten_s = 0.0
        self._housekeeping = Housekeeping(store)
        self._answerer: Answerer | None = None
        self._read_stamp = _stamp(config.source)
        self._configure(config)

    def _configure(self, config: Config) -> None:
        self._config = config
        self._knowledge.site_models = config.gpu_models
        self._hook_file = HookFile(config.hook_file, config.gpu_models)
        self._ingest = make_ingest(config, self._store, self._tags)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._config

    def once(self) -> TickReport:
        """One tick, everything included."""
        now_s, asked_s = time.time(), time.monotonic()
        jobs = self._slurm.jobs()
        changed = False
        if not self._dry_run:
            self._tags.take(jobs)
            self._claim(jobs)
            summary = self._ingest.run(now_s)
            changed = any(summary.counts.values())
        if self._ticks == 0 and not self._dry_run:
            self._check_slurm(self._slurm.config())
        if self._slurm_was_replaced():
            changed = True
        if changed or self._ticks == 0:
            with self._helper.lock:
                self._knowledge.catch_up()
        report = self._helper.tick(jobs, asked_s)
        report.calls += 1
        self._ticks += 1
        self._unreported["ticks"] += 1
        self._unreported["tick_ms"] += round(1000 * report.total_s)
        if self._answerer is not None:
            self._answerer.publish()
        if not self._dry_run:
            self._beat(now_s, changed)
            self._housekeeping.forget_old(self._config.keep_days, now_s)
            self._publisher.publish(report, now_s, self._config, self._knowledge.titles)
        return report

    def run(self) -> bool:
        """Tick until SIGTERM or SIGINT; the tick that is under way is finished.

        False if the store's file is another one now: all that was read from the old one must be read anew.
        """
        for number, handler in ((signal.SIGTERM, self._on_stop), (signal.SIGINT, self._on_stop),
                                (signal.SIGHUP, self._on_reload), (signal.SIGUSR1, self._on_nudge)):  # fmt: skip
            signal.signal(number, handler)
        config = self._slurm.config()
        _check_user(slurm_user(config))
        nudge = Wakeup(watched_paths(self._config.spool_dir, config.get("StateSaveLocation", "")))
        log.info("start", pid=os.getpid(), slurm=self._slurm.release, backend=self._slurm.name,
                 policy=self._helper.settings.policy, knowledge=self._knowledge.titles,
                 dry_run=self._dry_run or None)  # fmt: skip
        failures = 0
        self._answer_holds(config)
        while not self._stop:
            nudge.mark()
            begun = time.monotonic()
            try:
                self._tell(self.once())
                failures = 0
                if not self._dry_run:
                    self._housekeeping.look_for_damage()
            except GpushareError as error:
                # slurmctld restarts, a database is locked: say so, wait longer each time, go on.
                failures += 1
                log.warning("tick-failed", error=str(error), failures=failures)
                if isinstance(error, StoreReplaced) and self._has_store_again():
                    self._answer_holds({})
                    return False
            pause_s = min(LONGEST_PAUSE_S, self._config.tick_s * 2 ** min(failures, 6))
            if self._helper.state.watch.pauses.jobs:
                pause_s = min(pause_s, RENEW_S)
            self._nudged = False
            # After a failure news do not shorten the pause: records that arrive meanwhile are some every second.
            took_s = 0.0 if failures else time.monotonic() - begun
            # A tick may have been long because the helper stood still or slurmctld did not answer: resting in
            # proportion to that, the helper would be taken for dead.
            rest_s = self._config.heartbeat_s / 4
            nudge.wait(pause_s, took_s, self._is_interrupted, for_news=not failures, longest_rest_s=rest_s)
            if self._reload or _stamp(self._config.source) != self._read_stamp:
                self._on_new_config()
        self._answer_holds({})
        if not self._dry_run:
            self._say_goodbye()
        log.info("stop", ticks=self._ticks)
        return True

    def _is_interrupted(self) -> bool:
        return self._stop or self._reload or self._nudged

    def _say_goodbye(self) -> None:
        """So that the hook gives no lease that nobody would end, and nodes keep nobody standing still."""
        self._helper.let_all_go()
        try:
            self._hook_file.beat(0)
        except GpushareError as error:
            log.warning("stop", error=str(error))

    def _has_store_again(self) -> bool:
        """Whether there is a store to go on with; one that was deleted is written anew from what is still open."""
        try:
            if self._store.database.put_back():
                log.warning("store", message="it was deleted, and is back with all that was in it")
        except GpushareError as error:
            log.warning("store", error=str(error))
            return False
        return True

    def _check_slurm(self, slurm_conf: Mapping[str, str]) -> None:
        """What of our settings this Slurm is set up for; the rest is done without."""
        missing = missing_for_gangs(slurm_conf)
        possible = not missing and self._slurm.release.keeps_whole_gpus_apart
        self._hook_file.gangs = self._config.share_gangs and possible
        if self._config.share_gangs and not possible:
            why = f"SelectTypeParameters lacks {', '.join(missing)}" if missing else f"Slurm {self._slurm.release}"
            log.warning("gangs", error=f"{why}: jobs that want a whole node run as written")

    def _slurm_was_replaced(self) -> bool:
        """Tells the hook where configure knew another Slurm than the one that runs. Whether that is news."""
        stale = is_stale(self._config.slurm_version, self._slurm.release)
        if stale == self._hook_file.stale:
            return False
        self._hook_file.stale = stale
        if stale:
            log.warning("slurm-version", configured=self._config.slurm_version, running=self._slurm.release,
                        hint="No job is converted until 'gpushare configure --write' has run again.")  # fmt: skip
        return True

    def _answer_holds(self, slurm_conf: Mapping[str, str]) -> None:
        """Start to answer the nodes' holds, where there are any; without Slurm's configuration only stop it."""
        if self._answerer is not None:
            self._answerer.stop()
            self._answerer = None
        if self._dry_run or not slurm_conf or not self._config.epilog_hold_s or self._helper.places_nobody:
            return
        if completing_stops_everybody(slurm_conf):
            log.warning("hold", error="CompleteWait without reduce_completing_frag: no hold",
                        hint="A job in its epilog would keep all other jobs waiting too.")  # fmt: skip
            return
        try:
            self._answerer = Answerer(self._helper, self._slurm)
            self._answerer.start()
        except GpushareError as error:
            log.warning("hold", error=str(error))

    def _claim(self, jobs: list[Job]) -> None:
        """A token belongs to whoever submitted with it first, not to whose job ends first."""
        tagged = [job for job in jobs if job.tag and job.tag.token and job.tag.token not in self._claimed]
        self._store.workloads.claim(
            {job.tag.token: job.uid for job in sorted(tagged, key=_latest_first) if job.tag and job.tag.token}
        )
        self._claimed = {job.tag.token for job in jobs if job.tag and job.tag.token}

    def _beat(self, now_s: float, changed: bool) -> None:
        """Tell the hook that we are alive, and what is new; only after a tick that worked."""
        if changed or now_s - self._beaten_s >= min(10.0, self._config.heartbeat_s / 4) or now_s < self._beaten_s:
            self._store.live.beat("helper", now_s)
            # The first time all of it: what the file follows may have been another store until now.
            self._hook_file.sync(self._store, now_s, anew=not self._beaten_s)
            self._store.counters.add(self._unreported | self._helper.state.contest.drain())
            self._unreported = dict.fromkeys(self._unreported, 0)
            self._beaten_s = now_s

    def _tell(self, report: TickReport) -> None:
        if report.outcomes or self._ticks % 60 == 1:
            log.info(
                "tick", jobs=report.jobs, pending=report.pending, pairs=report.pairs, calls=report.calls,
                plan_ms=1000 * report.plan_s, ms=1000 * report.total_s, **report.outcomes,
            )  # fmt: skip

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self._reload = True

    def _on_nudge(self, number: int, frame: FrameType | None) -> None:
        self._nudged = True

    def _on_new_config(self) -> None:
        self._reload = False
        self._read_stamp = _stamp(self._config.source)  # first: a change while we read is read again
        try:
            config = load_config(self._config.source)
        except ConfigError as error:
            log.warning("reload", error=str(error), kept="the settings in force")
            return
        if config.store_url != self._config.store_url:
            log.warning("reload", error="StoreUrl changed: restart the helper")
        remember(config)
        self._configure(config)
        self._take_bases()
        self._helper.configure(config)
        slurm_conf = self._slurm.config()
        self._check_slurm(slurm_conf)
        self._answer_holds(slurm_conf)
        self._publisher.publish_now()
        log.info("reload", policy=self._helper.settings.policy)

    def _take_bases(self) -> None:
        """Start from the knowledge bases in force now; a node that asks meanwhile waits."""
        try:
            with self._helper.lock:
                if self._knowledge.take_bases():
                    self._helper.partners = self._knowledge.learners[0].partners
                    log.info("reload", knowledge=self._knowledge.titles)
        except GpushareError as error:
            log.warning("reload", error=str(error), kept="the knowledge base in force")


def collect_seldom() -> None:
    """Let Python look for cyclic garbage after 100,000 new objects, not after 700.

    A tick of a large site makes and drops so many, none of them in cycles: looking took a third of the tick.
    """
    gc.set_threshold(100_000, 10, 10)


def _stamp(path: Path | None) -> list[tuple[int, int, int] | None]:
    """What changes when gpushare.conf or the file beside it does; None for one that is not there."""
    found: list[tuple[int, int, int] | None] = []
    for file in (path, generated_path(path)) if path else ():
        try:
            about = file.stat()
            found.append((about.st_mtime_ns, about.st_size, about.st_ino))
        except OSError:
            found.append(None)
    return found


def _latest_first(job: Job) -> tuple[int, int]:
    return -job.submit_s, -job.raw_id


def _check_user(wanted: SlurmUser) -> None:
    if os.geteuid() not in {0, wanted.uid} and wanted.uid is not None:
        log.warning("user", error=f"the helper must run as SlurmUser {wanted.name}({wanted.uid}) to change jobs")


def backfill(config: Config, slurm: Slurm, *, once: bool, dry_run: bool, policy: str | None) -> TickReport | None:
    """Run the helper: one tick, or until it is told to stop. A dry run changes nothing and may run beside it."""
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(Lock(config.state_dir))
        collect_seldom()
        told_to_stop = False
        while not told_to_stop:
            with Store(config.store_url) if dry_run else Store.create(config.store_url) as store:
                if store.is_new:
                    made = "there was none: it is made anew, and every workload is measured again"
                    log.warning("store", path=store.database.where, message=made)
                daemon = Daemon(config, slurm, store, policy=policy, dry_run=dry_run)
                if once:
                    return daemon.once()
                told_to_stop = daemon.run()
                config = daemon.config
        return None


# One helper at a time.


class Lock:
    """An flock on ``StateDir/backfill.lock``: it ends with the process, however that ends."""

    def __init__(self, directory: Path, hint: str = "One is enough.") -> None:
        """`hint` says what to do while a helper holds it."""
        self._path = directory / "backfill.lock"
        self._hint = hint
        self._handle = -1

    def __enter__(self) -> Lock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # SlurmUser's alone: whoever can open it can hold the lock.
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            hand_over(self._path)
        except OSError as why:
            raise GpushareError(
                f"{self._path}: {why.strerror}", "StateDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise GpushareError(f"a helper runs already, with process id {holder}", self._hint) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)
