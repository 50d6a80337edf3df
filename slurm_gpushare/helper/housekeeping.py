"""Looking after the store between ticks: what is old is forgotten, and damage is looked for.

Damage shows itself only where somebody reads. Until then records would be taken into a file that a copy must replace,
and be lost with it; in the spool they are safe.
"""

from __future__ import annotations

import threading
import time

from slurm_gpushare.helper import log
from slurm_gpushare.helper.log import lower_priority
from slurm_gpushare.protocol.errors import ConfigError, GpushareError
from slurm_gpushare.protocol.files import uid_of
from slurm_gpushare.protocol.record import gpu_model
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.accounting import JobTokens
from slurm_gpushare.store import Store
from slurm_gpushare.store.credential import opener
from slurm_gpushare.store.ingest import Ingest
from slurm_gpushare.store.maintenance import damage, prune
from slurm_gpushare.store.statements import PRUNED_BEFORE

DAY_S = 86_400.0
LOOK_EVERY_S = 3600.0
"""At most so often is all of the store read,"""
LOOK_SHARE = 1e-5
"""and at most this share of the time is spent on it: not a second a day."""


class Housekeeping:
    """One store's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._forgot_at_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._look_at_s = 0.0
        """By the monotonic clock. At once after a start: the machine may have crashed."""

    @property
    def is_looking(self) -> bool:
        """Whether the store is being read."""
        return self._thread is not None and self._thread.is_alive()

    def forget_old(self, keep_days: int, now_s: float) -> None:
        """Once a day: what the store has kept for KeepDays. A failure costs nothing but room until tomorrow."""
        before_s = now_s - DAY_S * keep_days
        if now_s - self._forgot_at_s < DAY_S and now_s >= self._forgot_at_s:
            return
        if self.is_looking:  # the journal cannot be cut while somebody reads: the tick would wait for it
            return
        self._forgot_at_s = now_s
        try:
            if before_s - self._store.counters.all().get(PRUNED_BEFORE, 0) >= DAY_S:
                removed = prune(self._store, before_s)
                log.info("prune", older_than_days=keep_days, **removed)
        except GpushareError as error:
            log.warning("prune", error=str(error))

    def look_for_damage(self) -> None:
        """Begin to read all of the store, if it is time. Where it is damaged, ticks fail from the next one on."""
        due = time.monotonic() >= self._look_at_s and not self.is_looking
        if due and self._store.database.is_sqlite:  # a database server looks itself
            self._thread = threading.Thread(target=self._look, name="look-for-damage", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        lower_priority()
        begun_s = time.monotonic()
        try:
            if found := damage(self._store.database):
                self._store.database.condemn(found)
        except GpushareError as error:  # it is locked, or away: ticks find that too
            log.warning("store", error=str(error))
        finally:
            done_s = time.monotonic()
            self._look_at_s = done_s + max(LOOK_EVERY_S, (done_s - begun_s) / LOOK_SHARE)


# Ingest as the helper and ``gpushare db ingest`` run it: the store's, with tokens from Slurm's tags.


def make_ingest(config: Config, store: Store, tags: JobTokens) -> Ingest:
    """Takes records from the site's spool directory into `store`."""
    return Ingest(
        store,
        config.spool_dir,
        opener(config.munge_socket),
        tags.resolve,
        node_uids=[_uid(name) for name in config.node_users],
        gpu_models=[model for name in config.gpu_models if (model := gpu_model(name))],
    )


def _uid(name: str) -> int:
    uid = uid_of(name)
    if uid is None:
        raise ConfigError(f"NodeUsers: there is no user '{name}'")
    return uid
