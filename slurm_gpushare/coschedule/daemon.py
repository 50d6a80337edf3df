"""``gpushare backfill``: ticks, signals, lock and heartbeat around the `Helper`."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack
from types import FrameType

from slurm_gpushare.config import Config, load_config
from slurm_gpushare.coschedule import log
from slurm_gpushare.coschedule.helper import Helper, TickReport
from slurm_gpushare.coschedule.learn import Learner
from slurm_gpushare.coschedule.lock import Lock
from slurm_gpushare.coschedule.nudge import Nudge, watched_paths
from slurm_gpushare.coschedule.records import make_ingest
from slurm_gpushare.errors import ConfigError, GpushareError
from slurm_gpushare.slurm.interface import Slurm
from slurm_gpushare.slurm.queue import Job
from slurm_gpushare.slurm.tags import JobTags
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile

LONGEST_PAUSE_S = 60.0
_UID = re.compile(r"\((\d+)\)")


class Daemon:
    """The helper as a process. Its death costs only sharing: jobs carry their own undoing."""

    def __init__(self, config: Config, slurm: Slurm, store: Store, *, policy: str | None = None, dry_run: bool = False):
        self._slurm = slurm
        self._store = store
        self._dry_run = dry_run
        self._tags = JobTags(slurm)
        self._learner = Learner(store, writes=not dry_run)
        self._helper = Helper(config, slurm, store, self._learner.knowledge, policy=policy, dry_run=dry_run)
        self._stop = self._reload = self._nudged = False
        self._ticks = 0
        self._unreported = {"ticks": 0, "tick_ms": 0}
        self._claimed: set[str] = set()
        self._beaten_s = 0.0
        self._configure(config)

    def _configure(self, config: Config) -> None:
        self._config = config
        self._hook_file = HookFile(config.hook_file)
        self._ingest = make_ingest(config, self._store, self._tags)

    def once(self) -> TickReport:
        """One tick, everything included."""
        now_s = time.time()
        jobs = self._slurm.jobs()
        changed = False
        if not self._dry_run:
            self._tags.take(jobs)
            self._claim(jobs)
            summary = self._ingest.run(now_s)
            changed = any(summary.counts.values())
        if changed or self._ticks == 0:
            self._learner.catch_up(self._config)
        report = self._helper.tick(jobs)
        report.calls += 1
        self._ticks += 1
        self._unreported["ticks"] += 1
        self._unreported["tick_ms"] += round(1000 * report.total_s)
        if not self._dry_run:
            self._beat(now_s, changed)
        return report

    def run(self) -> None:
        """Tick until SIGTERM or SIGINT; the tick that is under way is finished."""
        for number, handler in ((signal.SIGTERM, self._on_stop), (signal.SIGINT, self._on_stop),
                                (signal.SIGHUP, self._on_reload), (signal.SIGUSR1, self._on_nudge)):  # fmt: skip
            signal.signal(number, handler)
        config = self._slurm.config()
        _check_user(config.get("SlurmUser", ""))
        nudge = Nudge(watched_paths(self._config.spool_dir, config.get("StateSaveLocation", "")))
        log.info("start", pid=os.getpid(), slurm=self._slurm.release, backend=self._slurm.name,
                 policy=self._helper.settings.policy, dry_run=self._dry_run or None)  # fmt: skip
        failures = 0
        while not self._stop:
            nudge.mark()
            begun = time.monotonic()
            try:
                self._tell(self.once())
                failures = 0
            except GpushareError as error:
                # slurmctld restarts, a database is locked: say so, wait longer each time, go on.
                failures += 1
                log.warning("tick-failed", error=str(error), failures=failures)
            pause_s = min(LONGEST_PAUSE_S, self._config.tick_s * 2 ** min(failures, 6))
            self._nudged = False
            nudge.wait(pause_s, time.monotonic() - begun, lambda: self._stop or self._reload or self._nudged)
            if self._reload:
                self._on_new_config()
        if not self._dry_run:
            self._hook_file.beat(0)  # so that the hook gives no lease that nobody would end
        log.info("stop", ticks=self._ticks)

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
            self._hook_file.sync(self._store, now_s)
            self._store.counters.add(self._unreported)
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
        try:
            config = load_config(self._config.source)
        except ConfigError as error:
            log.warning("reload", error=str(error), kept="the settings in force")
            return
        if config.store_url != self._config.store_url:
            log.warning("reload", error="StoreUrl changed: restart the helper")
        self._configure(config)
        self._helper.configure(config)
        log.info("reload", policy=self._helper.settings.policy)


def _latest_first(job: Job) -> tuple[int, int]:
    return -job.submit_s, -job.raw_id


def _check_user(slurm_user: str) -> None:
    found = _UID.search(slurm_user)
    if os.geteuid() and found and int(found[1]) != os.geteuid():
        log.warning("user", error=f"the helper must run as SlurmUser {slurm_user} to change jobs")


def backfill(config: Config, slurm: Slurm, *, once: bool, dry_run: bool, policy: str | None) -> TickReport | None:
    """Run the helper: one tick, or until it is told to stop. A dry run changes nothing and may run beside it."""
    with ExitStack() as stack:
        if dry_run:
            store = stack.enter_context(Store(config.store_url))
        else:
            stack.enter_context(Lock(config.state_dir))
            store = stack.enter_context(Store.create(config.store_url))
        daemon = Daemon(config, slurm, store, policy=policy, dry_run=dry_run)
        if once:
            return daemon.once()
        daemon.run()
        return None
