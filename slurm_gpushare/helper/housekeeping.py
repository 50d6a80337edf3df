"""Looking after the store between ticks: what is old is forgotten, and damage is looked for.

Damage shows itself only where somebody reads. Until then records would be taken into a file that a copy must replace,
and be lost with it; in the spool they are safe.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.errors import ConfigError, GpushareError, SlurmError
from slurm_gpushare.protocol.files import uid_of
from slurm_gpushare.protocol.history import StoredJob
from slurm_gpushare.protocol.record import gpu_model
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.protocol.tokens import OwnedToken
from slurm_gpushare.slurm.accounting import ENDED, AccountedJob, AccountingQuery, JobTokens, without_token
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.maintenance import clock_doubt, damage, pieces, present_s
from slurm_gpushare.store.statements import PRUNED_BEFORE

DAY_S = 86_400.0
FORGET_S = 5.0
"""Of each minute so much may be spent on forgetting."""
TOKENS_OUT_TO = "tokens_out_to_s"
"""The counter that says up to which time accounting was looked through."""
SETTLED_AFTER_S = 60.0
EVERY_HOUR_S = 3600
JOBS_A_COMMAND = 200
LOOK_EVERY_S = 3600.0
"""At most so often is all of the store read,"""
LOOK_SHARE = 1e-5
"""and at most this share of the time is spent on it: not a second a day."""


class Housekeeping:
    """One store's: it runs in a worker, and remembers when it did what."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._forgot_at_s = float("-inf")
        self._pieces: Iterator[tuple[str, int]] | None = None
        """What is being forgotten now."""
        self._removed: Counter[str] = Counter()
        self._doubt = ""
        self._look_at_s = 0.0
        """By the monotonic clock. At once after a start: the machine may have crashed."""

    def look_after(self, keep_days: int, now_s: float) -> None:
        """Do what is due. Nothing is forgotten while all of it is read: that would wait for the reader."""
        self.forget_old(keep_days, now_s)
        self.look_for_damage()

    def forget_old(self, keep_days: int, now_s: float) -> None:
        """What the store has kept for KeepDays, from once a day on: some of it now, the rest at the next calls.

        Nothing by a clock that somebody contradicts. A failure costs nothing but room until tomorrow.
        """
        try:
            doubt = clock_doubt(self._store.database, now_s)
            if doubt != self._doubt:
                self._doubt = doubt
                log.warning("clock", message=doubt or "nobody says another time any more")
            if doubt:
                return
            if self._pieces is None and not 0.0 <= now_s - self._forgot_at_s < DAY_S:
                self._forgot_at_s, self._removed = now_s, Counter()
                before_s = present_s(self._store.database, now_s) - DAY_S * keep_days
                if before_s - self._store.counters.all().get(PRUNED_BEFORE, 0) >= DAY_S:
                    self._pieces = pieces(self._store, before_s)
            self._go_on(keep_days)
        except GpushareError as error:
            self._pieces = None
            log.warning("prune", error=str(error))

    def _go_on(self, keep_days: int) -> None:
        """Forget for some seconds, and let others write for as long between two pieces."""
        until_s = time.monotonic() + FORGET_S
        while self._pieces is not None and (begun_s := time.monotonic()) < until_s:
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                log.info("prune", older_than_days=keep_days, **+self._removed)
            else:
                self._removed[piece[0]] += piece[1]
                time.sleep(min(time.monotonic() - begun_s, FORGET_S))

    def look_for_damage(self) -> None:
        """Read all of the store, if it is time. Where it is damaged, ticks fail from now on."""
        if time.monotonic() < self._look_at_s or not self._store.database.is_sqlite:  # a server looks itself
            return
        begun_s = time.monotonic()
        try:
            if found := damage(self._store.database):
                self._store.database.condemn(found)
        except GpushareError as error:  # it is locked, or away: ticks find that too
            log.warning("store", error=str(error))
        finally:
            done_s = time.monotonic()
            self._look_at_s = done_s + max(LOOK_EVERY_S, (done_s - begun_s) / LOOK_SHARE)


class AccountedTokens:
    """Takes the tokens of jobs that have ended out of accounting, where all users could link a user's runs by them.

    Only once the store knows job and token. What ended while no helper ran is caught up with, a day at a time.
    """

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._said = ""

    def take_out(self, keep_days: int, now_s: float) -> None:
        """The next piece: of at most a day, and not of the last minute, which accounting may not know yet.

        Not before 24.11, whose sacctmgr would spoil what other tools wrote.
        """
        if not self._slurm.release.can("keeps_small_and_capital"):
            return
        done_s = self._store.counters.all().get(TOKENS_OUT_TO, 0) or int(now_s - DAY_S * keep_days)
        to_s = min(int(now_s - SETTLED_AFTER_S), int(done_s + DAY_S))
        if to_s <= done_s:
            return
        start, end = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(s)) for s in (done_s - SETTLED_AFTER_S, to_s))
        try:
            jobs = self._slurm.accounting(AccountingQuery(start=start, end=end, states=ENDED))
            jobs = [job for job in jobs if job.end_s is not None and job.tag is not None and job.tag.token]
            self._store.jobs.add_ended([_ended(job) for job in jobs])
            texts: dict[str, list[int]] = {}
            for job in jobs:
                texts.setdefault(without_token(job.admin_comment), []).append(job.raw_id)
            for text, ids in texts.items():
                for first in range(0, len(ids), JOBS_A_COMMAND):
                    self._slurm.set_accounted_comment(ids[first : first + JOBS_A_COMMAND], text)
        except SlurmError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("accounting", error=self._said, message="tokens of ended jobs stay there for now")
            return
        self._said = ""
        if jobs or to_s - done_s > EVERY_HOUR_S:  # looked through twice costs less than a write at every look
            self._store.counters.put(TOKENS_OUT_TO, to_s)
        if jobs:
            log.info("accounting", tokens_taken_out=len(jobs))


def kept_tokens(store: Store, jobs: Sequence[AccountedJob]) -> dict[int, OwnedToken]:
    """The tokens that accounting names no more, by SLURM_JOB_ID."""
    stored = store.jobs.of_ids({job.raw_id for job in jobs}).values()
    known = {(item.job_id, item.uid, item.submit_s): item.token for items in stored for item in items if item.tag}
    found = ((job, known.get((job.raw_id, job.uid, job.submit_s))) for job in jobs)
    return {job.raw_id: OwnedToken(token, job.uid) for job, token in found if token}


def job_tokens(slurm: Slurm, store: Store) -> JobTokens:
    """Whose jobs were and with which token, by Slurm, and by the store where accounting names the token no more."""
    return JobTokens(slurm, partial(kept_tokens, store))


def _ended(job: AccountedJob) -> StoredJob:
    tag = job.tag
    return StoredJob(
        job.key, job.raw_id, job.uid, job.submit_s, job.submit_s, 0, job.start_s, tag.token if tag else None,
        str(tag) if tag else "", job.end_s,
    )  # fmt: skip


# Ingest as the helper and ``gpushare db ingest`` run it: the store's, with tokens from Slurm's tags.


def make_ingest(config: Config, store: Store, tags: JobTokens, *, known_users_only: bool = False) -> Ingest:
    """Takes records from the site's spool directory into `store`.

    ConfigError for a user in NodeUsers whom this machine does not know. For a helper that starts, `known_users_only`
    leaves such a name out and says so: then nobody's records but that user's are refused.
    """
    uids = {name: uid_of(name) for name in config.node_users}
    if unknown := [name for name, uid in uids.items() if uid is None]:
        error = ConfigError(f"NodeUsers: there is no user '{unknown[0]}'")
        if not known_users_only:
            raise error
        log.warning("settings", error=str(error), message="left out")
    return Ingest(
        store,
        config.spool_dir,
        opener(config.munge_socket),
        tags.resolve,
        node_uids=[uid for uid in uids.values() if uid is not None],
        gpu_models=[model for name in config.gpu_models if (model := gpu_model(name))],
    )
